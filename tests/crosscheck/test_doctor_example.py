"""The example GPT, as a JAX step and as a PyTorch loop: right ones are right, wrong ones named."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from jax_accum.crosscheck.gpt import GPT, GPTSizes  # noqa: E402
from jax_accum.doctor import diagnose  # noqa: E402

PATH = Path(__file__).parents[2] / "examples" / "doctor_gpt.py"


@pytest.fixture
def example(monkeypatch):
    """The example with a narrower model, which compiles sooner."""
    spec = importlib.util.spec_from_file_location("doctor_gpt", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = GPTSizes(layers=1, width=8, heads=2)
    monkeypatch.setattr(module, "SIZES", sizes)
    monkeypatch.setattr(module, "MODEL", GPT(sizes))
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("right", None),
        ("torch_right", None),
        ("mean_of_means", "mean of means"),
        ("torch_mean_of_means", "mean of means"),
    ],
)
def test_the_example_gpt_is_diagnosed_in_both_frameworks(example, name, fault):
    found = diagnose(*getattr(example, name)())
    assert (found.status, found.fault) == ("fault" if fault else "right", fault), found
    assert found.seconds > 0

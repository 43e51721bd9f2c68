"""The benchmark of both frameworks runs, at a tiny size, and both train the same."""

import json
from collections import Counter

import jax
import pytest
import torch

from benchmarks import _timing, frameworks
from benchmarks.__main__ import main
from benchmarks._framework_program import jax_update, torch_update
from benchmarks._machine import Limits
from benchmarks._result import Result


@pytest.fixture(autouse=True)
def settings_of_both_frameworks():
    """The frameworks' own settings, which a benchmark may change for its process, put back."""
    threads, precision = torch.get_num_threads(), jax.config.jax_default_matmul_precision
    yield
    torch.set_num_threads(threads)
    jax.config.update("jax_default_matmul_precision", precision)


def test_a_quick_run_compares_jax_with_both_ways_of_pytorch(tmp_path):
    assert main(["--quick", "--only", "frameworks", "--out", str(tmp_path)]) == 0
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    rates = {f["key"].split("/")[1] for f in result["figures"] if f["key"].endswith("/rate")}
    assert rates == {"jax", "jax, by hand", "torch", "torch.compile"}
    (claim,) = result["claims"]
    assert claim["key"] in {f["key"] for f in result["figures"]}


@pytest.mark.parametrize(
    ("eager", "compiled", "verdict"),
    [(1.25, 0.75, "does not"), (0.75, 1.25, "does not"), (1.25, 1.5, "holds")],
)
def test_the_claim_is_on_the_faster_way_of_pytorch(eager, compiled, verdict, monkeypatch):
    seconds = {"jax": 1.0, "jax, by hand": 1.0, "torch": eager, "torch.compile": compiled}
    now, updates = 0.0, Counter()

    class Process:
        peak = 2.0**20

        def __init__(self, framework, *size):
            self.framework = framework

        def read(self):
            return {"ready": True}

        def update(self):
            nonlocal now
            now += seconds[self.framework]
            updates[self.framework] += 1

        def ask(self, what):
            assert what == "products"
            return {"seconds": 2.0 if self.framework == "jax" else 1.0}

        def close(self):
            pass

    monkeypatch.setattr(frameworks, "Process", Process)
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: now)
    result = Result("frameworks", "?")
    frameworks.measure(result, "tiny", 4, 2, "float32", 4, Limits(1e9, 1e9))
    seconds |= {"jax": 0.5, "jax, by hand": 0.25}
    frameworks.measure(result, "small", 4, 2, "float32", 4, Limits(1e9, 1e9))
    result.claims += frameworks.claims(result)
    ((claim, figure, found),) = result.verdicts()
    assert (figure.value, found) == (min(eager, compiled), verdict)  # of the size that is slower
    assert "here tiny" in claim.why
    assert "plain JAX without jax_accum takes 1 of ours" in claim.why
    assert "take 2 times as long as PyTorch's" in claim.why
    # Four with all ways, and four more to decide, at either size.
    assert (updates["jax"], updates["jax, by hand"]) == (16, 8)


def test_both_frameworks_are_timed_on_the_same_training():
    size = {"layers": 1, "heads": 2, "width": 16, "max_length": 8}
    ours, theirs = jax_update(size, 4, 2, False), torch_update(size, 4, 2, False, False)
    by_hand = jax_update(size, 4, 2, False, by_hand=True)
    for _ in range(3):
        a, b, c = ours(), theirs(), by_hand()
        assert abs(a - b) < 1e-4 * abs(b)
        assert abs(a - c) < 1e-5 * abs(c)

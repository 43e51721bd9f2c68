"""The benchmark of both frameworks runs, at a tiny size, and both train the same."""

import json

import jax
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks._framework_program import jax_update, torch_update


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


def test_both_frameworks_are_timed_on_the_same_training():
    size = {"layers": 1, "heads": 2, "width": 16, "max_length": 8}
    ours, theirs = jax_update(size, 4, 2, False), torch_update(size, 4, 2, False, False)
    by_hand = jax_update(size, 4, 2, False, by_hand=True)
    for _ in range(3):
        a, b, c = ours(), theirs(), by_hand()
        assert abs(a - b) < 1e-4 * abs(b)
        assert abs(a - c) < 1e-5 * abs(c)

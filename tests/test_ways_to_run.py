"""Every way JAX runs gives the update of one device that takes the batch undivided."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

WAYS = Path(__file__).parents[1] / "examples" / "ways"

WORDS = {
    "jit_one_device": "jit on one device",
    "jit_sharded_batch": "jit with a sharded batch",
    "own_shard_map": "inside a shard_map of the caller's",
    "pmap": "pmap",
    "data_and_model_mesh": "a mesh of data and model axes",
    "two_processes": "two processes of two devices",
}


def runs_of(output: str) -> list[dict]:
    """The parameters of each run that a script reported, as trees of arrays."""
    is_leaf = lambda x: isinstance(x, list)  # noqa: E731
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [
        jax.tree.map(np.asarray, tree, is_leaf=is_leaf) for line in lines for tree in line.values()
    ]


@pytest.fixture(scope="module")
def wanted():
    spec = importlib.util.spec_from_file_location("task", WAYS / "task.py")
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    return task.undivided()


def test_there_is_a_script_for_every_way():
    assert {path.stem for path in WAYS.glob("*.py")} == {"task", *WORDS}


@pytest.mark.parametrize("name", WORDS, ids=WORDS.values())
def test_group_gradient_and_multi_steps_give_the_update_of_the_undivided_batch(
    name, wanted, run_python
):
    runs = runs_of(run_python(WAYS / f"{name}.py", devices=8))
    assert len(runs) == (4 if name == "two_processes" else 2)
    for params in runs:
        assert jax.tree.structure(params) == jax.tree.structure(wanted)
        for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
            # Three updates of AdamW: a step is at most 1e-2, and what rounding does to a
            # gradient moves it by a few parts in 1e-6 of that. A mean of means moves it by 1e-3.
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)

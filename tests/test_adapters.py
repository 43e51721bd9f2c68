"""The trainers people have, with accumulation in them, arrive where an undivided batch does."""

import ast
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

ADAPTERS = Path(__file__).parents[1] / "examples" / "adapters"
WHAT = {
    "plain_trees": "plain trees",
    "linen_train_state": "a Flax Linen TrainState",
    "nnx_optimizer": "a Flax NNX optimizer",
    "equinox_filtered": "Equinox with filtered parameters",
    "grain_source": "examples from Grain",
    "orbax_checkpoint": "a checkpoint of Orbax in the middle of a group",
}
NEEDS = {"grain_source": "grain", "orbax_checkpoint": "orbax.checkpoint"}
ONE_EVERY_CALL = {"linen_train_state", "orbax_checkpoint"}


@pytest.fixture(scope="module")
def task():
    spec = importlib.util.spec_from_file_location("adapters_task", ADAPTERS / "task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reports():
    """What the scripts reported, by name: each runs once."""
    return {}


@pytest.fixture
def run_adapter(run_python, reports):
    """Runs a script; returns the matrices that it reported, and the rest of its report."""

    def run(name):
        if name in reports:
            return reports[name]
        if name in NEEDS and importlib.util.find_spec(NEEDS[name].partition(".")[0]) is None:
            pytest.skip(f"{NEEDS[name]} is not installed")
        output = run_python(ADAPTERS / f"{name}.py")
        (line,) = [line for line in output.splitlines() if line.startswith("{")]
        report = json.loads(line)
        matrices = [np.asarray(x, np.float32) for x in report.pop("matrices")]
        return reports.setdefault(name, (matrices, report))

    return run


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        # Three updates of at most 0.1 x 0.5 a piece; the rounding of a float32 gradient moves
        # them by parts in 1e-7. A mean of means moves them by 1e-3 (see the test below).
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-7)


def test_there_is_a_test_for_every_script():
    others = {"task", "injected_learning_rate", "partitioned", "masked", "lbfgs"}
    assert {path.stem for path in ADAPTERS.glob("*.py")} == {*WHAT, *others}


def test_a_mean_of_means_is_seen(task):
    def mean_of_means(params, batch):
        def mean(params, part):
            log_p = jax.nn.log_softmax(jnp.tanh(part["x"] @ params[0]) @ params[1])
            some = part["y"] >= 0
            picked = jnp.take_along_axis(log_p, jnp.where(some, part["y"], 0)[:, None], 1)[:, 0]
            return -jnp.sum(jnp.where(some, picked, 0)) / jnp.maximum(jnp.sum(some), 1)

        return sum(mean(params, part) for part in task.microbatches(batch)) / task.MICROBATCHES

    tx, params = task.optimizer(), task.weights()
    state = tx.init(params)
    for batch in task.batches():
        updates, state = tx.update(jax.grad(mean_of_means)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    with pytest.raises(AssertionError):
        assert_same(params, task.undivided())


@pytest.mark.parametrize("name", WHAT, ids=WHAT.values())
def test_the_parameters_are_those_of_the_undivided_batch(name, task, run_adapter):
    matrices, report = run_adapter(name)
    assert_same(matrices, task.undivided())
    counts = report["counts"]
    assert (counts["updates"], counts["examples"]) == (task.UPDATES, task.UPDATES * task.ROWS)
    assert counts["microbatches"] in (
        {task.UPDATES * task.MICROBATCHES}
        if name in ONE_EVERY_CALL
        else range(task.UPDATES, task.UPDATES * task.MICROBATCHES + 1)
    )
    assert report.get("dropped", 0) == 0
    assert report.get("same", True)


def test_the_step_of_linen_counts_microbatches_and_that_of_nnx_updates(task, run_adapter):
    _, linen = run_adapter("linen_train_state")
    _, nnx = run_adapter("nnx_optimizer")
    assert linen["calls"] == task.UPDATES * task.MICROBATCHES
    assert nnx["calls"] == task.UPDATES == nnx["counts"]["updates"]


def test_a_learning_rate_that_the_host_sets_holds_from_the_next_group_on(task, run_adapter):
    matrices, _ = run_adapter("injected_learning_rate")
    rates = jnp.array([0.1, 0.05, 0.2])
    tx = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda n: -rates[n]))
    assert_same(matrices, task.undivided(tx))


def test_parts_with_optimizers_of_their_own_are_updated_once_per_group(task, run_adapter):
    matrices, report = run_adapter("partitioned")
    by_kind = {"first": optax.sgd(0.1, momentum=0.9), "second": optax.sgd(0.2)}
    parts = optax.partition(by_kind, ["first", "second"])
    assert_same(matrices, task.undivided(optax.chain(optax.clip_by_global_norm(0.5), parts)))
    assert report["counts"]["updates"] == task.UPDATES


def test_frozen_parameters_stay_bit_for_bit_and_the_others_train_alike(task, run_adapter):
    (frozen, trained, _, lean), report = run_adapter("masked")
    np.testing.assert_array_equal(frozen, task.weights()[0])
    want = task.undivided(trained=(False, True))
    assert_same([trained, lean], [want[1], want[1]])
    assert report["counts"]["updates"] == task.UPDATES


def test_lbfgs_searches_along_the_loss_of_the_whole_group(task, run_adapter):
    _, report = run_adapter("lbfgs")
    batch = next(task.batches())
    tx = optax.lbfgs()

    def loss(params):
        log_p = jax.nn.log_softmax(jnp.tanh(batch["x"] @ params[0]) @ params[1])
        some = batch["y"] >= 0
        picked = jnp.take_along_axis(log_p, jnp.where(some, batch["y"], 0)[:, None], 1)[:, 0]
        return -jnp.sum(jnp.where(some, picked, 0)) / jnp.sum(some)

    @jax.jit
    def update(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state, value

    params = task.weights()
    state = tx.init(params)
    for accumulated in report["losses"]:
        params, state, value = update(params, state)
        # A line search chooses among steps by comparisons, and amplifies rounding.
        assert accumulated == pytest.approx(float(value), rel=1e-4)
    falling = sorted(set(report["losses"]), reverse=True)
    assert falling == report["losses"]


@pytest.mark.parametrize("path", sorted(ADAPTERS.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_says_first_what_it_is(path):
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert doc
    assert len(doc.splitlines()[0]) < 100

"""`MultiSteps` among Optax's own wrappers and optimizers, and Optax's tests of its own class."""

import importlib.util
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.ones(4)}
GRADS = [jax.tree.map(lambda p, n=n: jnp.cos(p + n), PARAMS) for n in range(4)]
MEANS = [
    jax.tree.map(lambda a, b: (a + b) / 2, *GRADS[:2]),
    jax.tree.map(lambda a, b: (a + b) / 2, *GRADS[2:]),
]
LABELS = {"w": "first", "b": "second"}

INNER = {
    "adafactor": lambda: optax.adafactor(0.1),
    "muon": lambda: optax.contrib.muon(0.1),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1),
    "lion": lambda: optax.lion(0.1),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(0.1, 0.0, 10)
    ),
    "partition": lambda: optax.partition(
        {"first": optax.adam(0.1), "second": optax.set_to_zero()}, LABELS
    ),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "chain with a clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)),
    "lamb": lambda: optax.lamb(0.1),
}


def assert_near(got, want):
    """Within what contraction of sums by the compiler does."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", INNER)
def test_two_groups_of_two_are_two_updates_of_the_optimizer_alone(name):
    inner = INNER[name]()
    opt = ja.MultiSteps(inner, 2)

    # Everything is donated, also the first state; some of these keep the parameters in it.
    step = jax.jit(lambda p, s, g: opt.apply(g, s, p), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = opt.init(params)
    for grads in GRADS:
        params, state = step(params, state, grads)

    @jax.jit
    def alone(params, state, grads):
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    want, want_state = PARAMS, inner.init(PARAMS)
    for mean in MEANS:
        want, want_state = alone(want, want_state, mean)
    assert_near((params, state.inner_opt_state), (want, want_state))


AROUND = {
    "chain": lambda tx: optax.chain(optax.identity(), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
    "partition": lambda tx: optax.partition({"first": tx, "second": tx}, LABELS),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda learning_rate: optax.chain(tx, optax.scale(learning_rate))
    )(1.0),
}


@pytest.mark.parametrize("name", AROUND)
def test_it_works_inside_the_wrappers_of_optax(name):
    tx = AROUND[name](ja.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(tx.update)
    for n, grads in enumerate(GRADS):
        updates, state = step(grads, state, params)
        if n % 2:
            assert_near(updates, jax.tree.map(jnp.negative, MEANS[n // 2]))
        else:
            assert not any(jnp.any(u) for u in jax.tree.leaves(updates))
    assert ja.counts(state)["updates"] == 2


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "gradient_transformation"])
def test_extra_arguments_of_the_ending_call_reach_the_inner_optimizer(wrapped):
    inner = optax.polyak_sgd()
    opt = ja.MultiSteps(inner, 2)
    tx = optax.chain(opt.gradient_transformation()) if wrapped else opt
    state = tx.init(PARAMS)
    for n in range(2):
        updates, state = tx.update(GRADS[n], state, PARAMS, value=jnp.float32(n + 0.5))
    want, _ = inner.update(MEANS[0], inner.init(PARAMS), PARAMS, value=jnp.float32(1.5))
    assert_near(updates, want)


def test_weights_pass_through_chain():
    tx = optax.chain(ja.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
    state = tx.init(jnp.zeros(()))
    for grad, weight in ((2.0, 512), (4.0, 1536)):
        updates, state = tx.update(jnp.float32(grad), state, weight=weight)
    assert float(updates) == -3.5


def test_lbfgs_with_its_line_search():
    target = jnp.arange(3.0)
    f = lambda x: jnp.sum((x - target) ** 2)  # noqa: E731
    opt = ja.MultiSteps(optax.lbfgs(), 2)
    params = jnp.zeros(3)
    state = opt.init(params)

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(f)(params)
        return opt.apply(grad, state, params, value=value, grad=grad, value_fn=f)

    for _ in range(8):
        params, state = step(params, state)
    np.testing.assert_allclose(params, target, atol=1e-5)
    assert ja.counts(state)["updates"] == 4


def test_the_arrays_of_an_equinox_module():
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt = ja.MultiSteps(optax.adam(0.1), 2)
    state = opt.init(params)

    @eqx.filter_jit
    def step(params, state, x):
        loss = lambda p: jnp.sum(eqx.combine(p, static)(x) ** 2)  # noqa: E731
        return opt.apply(jax.grad(loss)(params), state, params, flush=True)

    new, state = step(params, state, jnp.ones(2))
    assert opt.has_updated(state)
    assert not eqx.tree_equal(new, params)
    with pytest.raises(TypeError, match="not an array"):
        opt.init(model)


def test_the_state_begins_with_the_fields_of_optax_in_their_order():
    theirs = optax.MultiStepsState._fields
    assert ja.MultiStepsState._fields[: len(theirs)] == theirs


PROGRAM = """
import sys
import optax, pytest
from optax.transforms import _accumulation
import jax_accum as ja
_accumulation.MultiSteps = optax.MultiSteps = ja.MultiSteps
_accumulation.MultiStepsState = optax.MultiStepsState = ja.MultiStepsState
sys.exit(pytest.main([sys.argv[1], "-q", "-p", "no:cacheprovider", "-c", "/dev/null",
    "--rootdir", sys.argv[2], "--import-mode=importlib", "-k", "multi_steps or skip"]))
"""
THEIR_TESTS = Path(optax.__file__).parent / "transforms" / "_accumulation_test.py"


@pytest.mark.skipif(not THEIR_TESTS.exists(), reason="this Optax is installed without its tests")
@pytest.mark.skipif(not importlib.util.find_spec("absl"), reason="Optax's tests need absl-py")
def test_the_tests_of_optax_for_its_own_class_pass(run_python, tmp_path):
    output = run_python(PROGRAM, str(THEIR_TESTS), str(tmp_path))
    assert " passed" in output
    assert "failed" not in output

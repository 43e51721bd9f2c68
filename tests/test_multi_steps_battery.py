"""What every configuration of `MultiSteps` and `guard` passes: jit, scan, vmap, donation, types."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja
from jax_accum._multi_steps_state import MultiStepsState


def reject_large(updates, gradient_step, params):
    return jnp.max(abs(updates["a"])) > 1e3, {"seen": gradient_step}


def doubling(updates):
    return jnp.minimum(2**updates, 4)


TWO = jnp.int32(2)
SCALE = ja.DynamicLossScale(initial=8.0, growth_interval=2)
CONFIGS = {
    "defaults": lambda: ja.MultiSteps(optax.adam(0.1), 2),
    "groups of one": lambda: ja.MultiSteps(optax.adam(0.1), 1),
    "a schedule of k": lambda: ja.MultiSteps(optax.adam(0.1), doubling),
    "a schedule that returns an array": lambda: ja.MultiSteps(optax.adam(0.1), lambda updates: TWO),
    "plain sums": lambda: ja.MultiSteps(optax.sgd(0.1, momentum=0.9), 2, use_grad_mean=False),
    "compensated": lambda: ja.MultiSteps(optax.adam(0.1), 3, compensated=True),
    "some rejected": lambda: ja.MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=reject_large),
    "guarded": lambda: ja.MultiSteps(ja.guard(optax.adamw(0.1)), 2),
    "guarded with a loss scale": lambda: ja.MultiSteps(
        ja.guard(optax.adamw(0.1), loss_scale=SCALE, max_consecutive_skips=3), 2
    ),
    "inside chain": lambda: ja.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), ja.guard(optax.adam(0.1))), 2
    ),
    "hyperparameters injected": lambda: ja.MultiSteps(
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 10)), 2
    ),
    "Adafactor": lambda: ja.MultiSteps(optax.adafactor(0.1), 2),
}
PARAMS = {
    "a": jnp.linspace(-1, 1, 6).reshape(2, 3),
    "b": jnp.ones((), jnp.bfloat16),
    "none": None,
    "c": jnp.full(4, 2.0, jnp.float16),
}
GRADS = [
    {
        "a": jnp.full((2, 3), x),
        "b": jnp.asarray(x, jnp.bfloat16),
        "none": None,
        "c": jnp.full(4, x, jnp.float16),
    }
    for x in (0.5, -1.0, 0.25, 2.0, 1.0)
]
WEIGHTS = (1.0, 3.0, 0.0, 2.0, 4.0)
every_configuration = pytest.mark.parametrize("name", CONFIGS)


def fresh(tree):
    """A copy that can be donated."""
    return jax.tree.map(jnp.copy, tree)


def calls(opt, step, params=None, state=None):
    """Parameters and state after five calls, and a flush."""
    params = fresh(PARAMS) if params is None else params
    state = opt.init(params) if state is None else state
    for n, (grads, weight) in enumerate(zip(GRADS, WEIGHTS, strict=True)):
        params, state = step(params, state, grads, jnp.float32(weight), jnp.asarray(n == 4))
    return params, state


def by_apply(opt):
    return lambda p, s, g, w, f: opt.apply(g, s, p, weight=w, flush=f, examples=2)


def by_update(opt):
    def step(p, s, g, w, f):
        updates, s = opt.update(g, s, p, weight=w, flush=f, examples=2)
        return optax.apply_updates(p, updates), s

    return step


WAYS = pytest.mark.parametrize("way", [by_apply, by_update])


def meaningful(tree):
    """`tree` without the accumulators of groups that have ended."""

    def without(node):
        if not isinstance(node, MultiStepsState) or node.mini_step:
            return node
        return node._replace(acc_grads=(), compensation=())

    return jax.tree.map(without, tree, is_leaf=lambda node: isinstance(node, MultiStepsState))


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, jax.typeof(x).weak_type), tree)


def assert_near(got, want):
    """Equal but for what a compiler may contract; exact in every integer."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jnp.inexact):
            eps = float(jnp.finfo(x.dtype).eps)
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            np.testing.assert_allclose(x, y, rtol=64 * eps, atol=64 * eps)
        else:
            np.testing.assert_array_equal(x, y)


class Run:
    """Five calls of a configuration through one compiled function that donates its arguments."""

    def __init__(self, name, way):
        self.opt, self.traces = CONFIGS[name](), 0
        one = way(self.opt)

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(*args):
            self.traces += 1
            return one(*args)

        params, state = fresh(PARAMS), self.opt.init(PARAMS)
        self.types = [types((params, state))]
        self.first = fresh(calls(self.opt, step, params, state))
        self.types.append(types(self.first))
        self.types.append(types(calls(self.opt, step, *fresh(self.first))))


run = functools.cache(Run)


@every_configuration
def test_jit_equals_eager(name):
    opt = CONFIGS[name]()
    eager = calls(opt, by_apply(opt))
    assert_near(run(name, by_apply).first, eager)
    assert ja.counts(eager[1])["updates"] >= 1


@every_configuration
def test_apply_is_update_and_apply_updates(name):
    assert_near(meaningful(run(name, by_apply).first), meaningful(run(name, by_update).first))


@WAYS
@every_configuration
def test_structure_dtypes_and_weak_types_are_the_same_after_every_call(name, way):
    initial, *later = run(name, way).types
    assert all(types == initial for types in later)


@WAYS
@every_configuration
def test_it_is_traced_once_from_the_initial_state_and_from_donated_ones(name, way):
    assert run(name, way).traces == 1


@every_configuration
def test_no_two_fields_of_a_new_state_share_a_buffer(name):
    params = fresh(PARAMS)
    state = CONFIGS[name]().init(params)
    arrays = jax.tree.leaves((params, state))
    pointers = [x.unsafe_buffer_pointer() for x in arrays if x.size]
    assert len(set(pointers)) == len(pointers)


@every_configuration
def test_the_initial_state_is_the_same_abstractly_and_under_jit(name):
    opt = CONFIGS[name]()
    state, abstract = opt.init(PARAMS), jax.eval_shape(opt.init, PARAMS)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    assert types(abstract) == types(state)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(opt.init)(PARAMS), state)


@every_configuration
def test_a_scan_gives_what_single_calls_give(name):
    opt = CONFIGS[name]()
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *GRADS)
    flushes = jnp.arange(5) == 4

    @jax.jit
    def scanned(params, state):
        def body(carry, x):
            return by_apply(opt)(*carry, *x), None

        return jax.lax.scan(body, (params, state), (stacked, jnp.array(WEIGHTS), flushes))[0]

    assert_near(scanned(PARAMS, opt.init(PARAMS)), run(name, by_apply).first)


@every_configuration
def test_vmap_gives_what_single_models_give(name):
    opt = CONFIGS[name]()
    params = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    state = jax.vmap(opt.init)(params)
    each = jax.jit(jax.vmap(by_apply(opt), in_axes=(0, 0, None, 0, 0)))
    for n, (grads, weight) in enumerate(zip(GRADS, WEIGHTS, strict=True)):
        # The second model is given other weights, so that the groups of one are skips.
        weights, flushes = jnp.array([weight, 0.0]), jnp.array([n == 4, n == 0])
        params, state = each(params, state, grads, weights, flushes)
    first, second = (jax.tree.map(lambda x, i=i: x[i], (params, state)) for i in range(2))
    assert_near(first, run(name, by_apply).first)
    assert ja.counts(second[1])["updates"] == 0
    assert_near(second[0], PARAMS)


@every_configuration
def test_the_updates_have_the_dtypes_of_the_inner_optimizers(name):
    opt = CONFIGS[name]()
    want, _ = jax.eval_shape(opt.inner_opt.update, GRADS[0], opt.inner_opt.init(PARAMS), PARAMS)
    updates, _ = opt.update(GRADS[0], opt.init(PARAMS), PARAMS)
    assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, want)


@pytest.mark.parametrize("params", [{}, [], (), {"none": None}], ids=repr)
@pytest.mark.parametrize("k", [1, 2])
def test_an_empty_tree_has_groups_as_well(params, k):
    opt = ja.MultiSteps(ja.guard(optax.adam(0.1)), k)
    state = opt.init(params)
    for way in (by_apply, by_update):
        done = state
        for _ in range(4):
            out, done = jax.jit(way(opt))(params, done, params, jnp.float32(1), False)
        assert out == params
        assert ja.counts(done)["updates"] == 4 // k

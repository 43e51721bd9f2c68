"""What XLA makes of `MultiSteps`: temporary memory, copies, and how often the optimizer runs."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_accum as ja

LEAVES, SHAPE = 24, (256, 512)
TREE = 4 * LEAVES * SHAPE[0] * SHAPE[1]  # bytes
LEAF = TREE / LEAVES
PARAMS = {f"w{n:02}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for n in range(LEAVES)}
SCALARS = 2**14  # bytes: room for counters, flags, and a pointer for each buffer


def compiled(opt, way, weight=True, donate=(0, 1)):
    """A call that donates parameters and state, in the order of its results."""

    def apply(params, state, grads, w):
        return opt.apply(grads, state, params, **({"weight": w} if weight else {}))

    def update(params, state, grads, w):
        updates, state = opt.update(grads, state, params, **({"weight": w} if weight else {}))
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(opt.init, PARAMS)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    call = {"apply": apply, "update": update}[way]
    return jax.jit(call, donate_argnums=donate).lower(PARAMS, state, PARAMS, scalar).compile()


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


def copies(program):
    """The shapes that are copied, anywhere in the program."""
    return re.findall(r" = (\S+?)(?:\{\S*)? copy\(", program.as_text())


def alone(inner):
    """Bytes of temporary memory of the inner optimizer, donated."""

    def step(params, state, grads):
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = jax.jit(step, donate_argnums=(0, 1))
    lowered = program.lower(PARAMS, jax.eval_shape(inner.init, PARAMS), PARAMS)
    return temporary(lowered.compile())


@pytest.mark.parametrize("weight", [False, True], ids=["no weight", "a weight"])
@pytest.mark.parametrize("k", [8, lambda updates: 8 + updates], ids=["constant k", "a schedule"])
@pytest.mark.parametrize("way", ["apply", "update"])
def test_a_call_adds_in_place_and_copies_no_more_than_one_scalar(way, k, weight):
    """By `update` as well: the accumulator lends its memory, no branch makes a tree of zeros."""
    program = compiled(ja.MultiSteps(optax.adamw(1e-3), k), way, weight)
    assert temporary(program) <= SCALARS
    assert copies(program) in ([], ["s32[]"])
    assert program.memory_analysis().alias_size_in_bytes >= 4 * TREE


def test_without_donation_apply_does_need_a_place_for_its_results():
    opt = ja.MultiSteps(optax.adamw(1e-3), 8)
    assert compiled(opt, "apply", donate=()).memory_analysis().alias_size_in_bytes == 0


def test_a_weighted_group_of_one_needs_one_tree_of_updates_and_no_more():
    program = compiled(ja.MultiSteps(optax.adamw(1e-3), 1), "update")
    assert temporary(program) <= TREE + SCALARS


def test_the_wrapper_of_optax_needs_three():
    """So that the figures above tell something."""
    inner = optax.MultiSteps(optax.adamw(1e-3), 8)

    def step(params, state, grads):
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(inner.init, PARAMS)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, PARAMS).compile()
    assert temporary(program) >= 2.9 * TREE


@pytest.mark.parametrize("way", ["apply", "update"])
def test_a_group_of_one_costs_the_inner_optimizer_alone(way):
    inner = optax.adamw(1e-3)
    opt = ja.MultiSteps(inner, 1)
    program = compiled(opt, way, weight=False)
    assert temporary(program) <= alone(inner) + SCALARS
    assert all(shape.endswith("[]") for shape in copies(program))
    state = jax.eval_shape(opt.init, PARAMS)
    assert len(jax.tree.leaves((state.acc_grads, state.compensation))) == 0


def test_a_weighted_group_of_one_is_applied_in_place_too():
    opt = ja.MultiSteps(optax.adamw(1e-3), 1)
    assert temporary(compiled(opt, "apply")) <= SCALARS


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("scale", [None, ja.DynamicLossScale()], ids=["no scale", "a loss scale"])
def test_a_guard_inside_is_applied_in_place(k, scale):
    opt = ja.MultiSteps(ja.guard(optax.adamw(1e-3), loss_scale=scale), k)
    program = compiled(opt, "apply")
    assert temporary(program) <= 2 * LEAF + SCALARS  # what it looks at for a NaN
    assert not any(shape.startswith("f32[256") for shape in copies(program))


def test_a_guard_inside_update_is_in_place_too():
    program = compiled(ja.MultiSteps(ja.guard(optax.adamw(1e-3)), 8), "update")
    assert temporary(program) <= 2 * LEAF + SCALARS
    assert not any(shape.startswith("f32[256") for shape in copies(program))


def test_a_guard_alone_is_applied_in_place():
    tx = ja.guard(optax.adamw(1e-3))
    state = jax.eval_shape(tx.init, PARAMS)

    def step(params, state, grads):
        return tx.apply(grads, state, params)

    program = jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, PARAMS).compile()
    assert temporary(program) <= 2 * LEAF + SCALARS


@pytest.mark.parametrize("way", ["apply", "update"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_the_inner_optimizer_runs_exactly_once_per_update(way, k, guarded):
    ran = []

    def count(updates, state, params=None):
        jax.debug.callback(lambda: ran.append(1))
        return updates, state

    inner = optax.GradientTransformation(lambda params: (), count)
    opt = ja.MultiSteps(ja.guard(inner) if guarded else inner, k)
    params = {"w": jnp.ones(3)}
    state = opt.init(params)
    step = jax.jit(lambda g, s, p, w: getattr(opt, way)(g, s, p, weight=w))
    for n in range(6):
        _, state = step(params, state, params, jnp.float32(n < 3))  # then skips: no weight
    jax.effects_barrier()
    assert len(ran) == 3 // k == ja.counts(state)["updates"]

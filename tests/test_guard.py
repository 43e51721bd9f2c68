"""What `guard` does with a gradient that is not finite, and what it counts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja

PARAMS = {"w": jnp.array([1.0, -0.0, 3.0]), "b": jnp.ones((), jnp.bfloat16)}
GOOD = jax.tree.map(jnp.ones_like, PARAMS)
SCHEDULE = optax.linear_schedule(0.1, 0.0, 100)


def bad(value, leaf="w"):
    return {**GOOD, leaf: jnp.full_like(GOOD[leaf], value)}


def assert_bitwise(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("leaf", ["w", "b"])
@pytest.mark.parametrize("way", ["update", "apply"])
def test_a_skip_leaves_parameters_and_inner_state_as_they_are_bit_for_bit(value, leaf, way):
    tx = ja.guard(optax.chain(optax.ema(0.9), optax.adamw(SCHEDULE)))
    _, state = tx.update(GOOD, tx.init(PARAMS), PARAMS)
    out, new = jax.jit(getattr(tx, way))(bad(value, leaf), state, PARAMS)
    assert_bitwise(out, PARAMS if way == "apply" else jax.tree.map(jnp.zeros_like, PARAMS))
    assert_bitwise(new.inner_state, state.inner_state)
    counts = ja.counts(new)
    assert (counts["attempts"], counts["updates"], counts["skipped_nonfinite"]) == (2, 1, 1)


@pytest.mark.parametrize("way", ["update", "apply"])
@pytest.mark.parametrize("at", [0, 1], ids=["in the first microbatch", "in the ending one"])
def test_around_a_guard_a_skip_hands_out_zeros_and_the_next_group_is_clean(way, at):
    tx = ja.MultiSteps(ja.guard(optax.adam(0.1)), 2)
    call = jax.jit(getattr(tx, way))
    nothing = PARAMS if way == "apply" else jax.tree.map(jnp.zeros_like, PARAMS)

    def clean_group(state):
        for _ in range(2):
            out, state = call(GOOD, state, PARAMS)
        return out, state.inner_opt_state.inner_state

    state = tx.init(PARAMS)
    for n in range(2):
        out, state = call(bad(jnp.inf) if n == at else GOOD, state, PARAMS)
        assert_bitwise(out, nothing)
    assert ja.counts(state)["skipped_nonfinite"] == 1
    assert_bitwise(clean_group(state), clean_group(tx.init(PARAMS)))


def test_a_finite_gradient_is_what_the_inner_optimizer_alone_would_make_of_it():
    inner = optax.sgd(0.1, momentum=0.5)
    tx = ja.guard(inner)
    got = tx.update(GOOD, tx.init(PARAMS), PARAMS)
    want = inner.update(GOOD, inner.init(PARAMS), PARAMS)
    assert_bitwise((got[0], got[1].inner_state), want)


@pytest.mark.parametrize("size", [1, 7, 4099])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_one_bad_entry_is_found_wherever_it_stands(size, dtype):
    tx = ja.guard(optax.identity())
    good = jnp.full(size, jnp.finfo(dtype).max, dtype)
    update, state = jax.jit(tx.update), tx.init(good)
    assert ja.counts(update(good, state)[1])["updates"] == 1  # though its norm overflows
    for at in {0, size // 2, size - 1}:
        for value in (jnp.nan, -jnp.inf):
            assert ja.counts(update(good.at[at].set(value), state)[1])["skipped_nonfinite"] == 1
    if dtype == jnp.complex64:
        imaginary = good.at[0].set(complex(0.0, float("nan")))
        assert ja.counts(update(imaginary, state)[1])["skipped_nonfinite"] == 1


def test_a_bad_gradient_can_be_passed_on_and_seen_in_the_state():
    tx = ja.guard(optax.sgd(1.0), on_nonfinite="apply", max_consecutive_skips=1)
    state = tx.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(bad(jnp.nan), state, PARAMS)
    assert jnp.isnan(updates["w"]).all()
    assert ja.counts(state)["updates"] == 2
    assert int(state.consecutive_skips) == 2
    with pytest.raises(FloatingPointError):
        ja.check(state)


def test_after_too_many_skips_in_a_row_check_raises_with_the_counts_and_skipping_goes_on():
    tx = ja.guard(optax.sgd(1.0), max_consecutive_skips=2)
    update, state = jax.jit(tx.update), tx.init(PARAMS)
    for grads in (bad(jnp.nan), bad(jnp.nan), GOOD, bad(jnp.nan), bad(jnp.nan)):
        _, state = update(grads, state)
        ja.check(state)  # never three in a row
    updates, state = update(bad(jnp.nan), state)
    assert not updates["w"].any()
    with pytest.raises(FloatingPointError, match=r"3 attempts in a row.*'skipped_nonfinite': 5"):
        ja.check((optax.EmptyState(), state))
    _, state = update(GOOD, state)
    with pytest.raises(FloatingPointError):  # the mark stays
        ja.check(state)


def test_check_is_silent_where_there_is_nothing_to_check():
    ja.check(optax.adam(0.1).init(PARAMS))
    ja.check(ja.guard(optax.adam(0.1)).init(PARAMS))


def test_a_call_without_weight_is_a_skip_of_its_own_kind():
    tx = ja.guard(optax.adam(0.1))
    updates, state = tx.update(bad(jnp.nan), tx.init(PARAMS), PARAMS, weight=0)
    assert not updates["w"].any()
    counts = ja.counts(state)
    assert (counts["attempts"], counts["skipped_empty"], counts["skipped_nonfinite"]) == (1, 1, 0)
    assert int(state.consecutive_skips) == 0


def test_a_traced_weight_that_is_not_a_number_is_a_skip():
    tx = ja.guard(optax.adam(0.1))
    update = jax.jit(lambda g, s, w: tx.update(g, s, PARAMS, weight=w))
    assert ja.counts(update(GOOD, tx.init(PARAMS), -1.0)[1])["skipped_nonfinite"] == 1


def test_alone_it_counts_what_it_is_told():
    tx = ja.guard(optax.adam(0.1))
    _, state = tx.update(GOOD, tx.init(PARAMS), PARAMS, weight=512, examples=4, microbatches=2)
    _, state = tx.update(GOOD, state, PARAMS, weight=1.0, examples=4, tokens=7)
    counts = ja.counts(state)
    assert (counts["microbatches"], counts["examples"], counts["tokens"]) == (3, 8, 519)


def test_inside_multi_steps_the_outer_counters_know_of_the_skips():
    opt = ja.MultiSteps(ja.guard(optax.adam(0.1)), 2)
    state = opt.init(PARAMS)
    for grads in (GOOD, GOOD, GOOD, bad(jnp.inf), bad(jnp.nan), GOOD):
        _, state = opt.update(grads, state, PARAMS, weight=3, examples=1)
    assert ja.counts(state) == {
        "microbatches": 6,
        "examples": 6,
        "tokens": 18,
        "attempts": 3,
        "updates": 1,
        "skipped_nonfinite": 2,
        "skipped_empty": 0,
    }
    assert not opt.has_updated(state)
    assert int(state.gradient_step) == 1


@pytest.mark.parametrize("way", ["update", "apply"])
def test_multi_steps_inside_still_gets_the_weights(way):
    opt = ja.guard(ja.MultiSteps(optax.sgd(1.0), 2))
    params, state = jnp.zeros(()), opt.init(jnp.zeros(()))
    for grad, weight in ((2.0, 512), (4.0, 1536)):
        out, state = getattr(opt, way)(jnp.float32(grad), state, params, weight=weight)
        params = out if way == "apply" else params + out
    assert float(params) == -3.5


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.masked(tx, {"w": True, "b": True}),
        lambda tx: optax.partition({"all": tx}, {"w": "all", "b": "all"}),
    ],
    ids=["chain", "masked", "partition"],
)
def test_the_counters_are_found_through_what_stands_around(around):
    tx = around(ja.guard(optax.adam(0.1), max_consecutive_skips=1))
    opt = ja.MultiSteps(tx, 1)
    state = opt.init(PARAMS)
    for grads in (GOOD, bad(jnp.nan), bad(jnp.nan)):
        _, state = opt.update(grads, state, PARAMS)
    assert ja.counts(state)["skipped_nonfinite"] == 2
    assert ja.counts(state.inner_opt_state)["updates"] == 1
    with pytest.raises(FloatingPointError):
        ja.check(state)


def test_a_guard_around_partition_decides_for_every_part():
    parts = optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"})
    tx = ja.guard(parts)
    updates, _ = tx.update(bad(jnp.nan, "b"), tx.init(PARAMS), PARAMS)
    assert not updates["w"].any()
    assert not updates["b"].any()


def test_extra_arguments_reach_the_inner_optimizer():
    tx = ja.guard(optax.polyak_sgd())
    grads = {"w": jnp.ones(2)}
    updates, _ = tx.update(grads, tx.init(grads), grads, value=jnp.float32(0.5))
    want, _ = optax.polyak_sgd().update(
        grads, optax.polyak_sgd().init(grads), grads, value=jnp.float32(0.5)
    )
    assert_bitwise(updates, want)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"on_nonfinite": "raise"}, ValueError, "on_nonfinite must be 'skip' or 'apply'"),
        ({"loss_scale": 2.0}, TypeError, r"loss_scale must be a jax_accum\.DynamicLossScale"),
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips must be at least 1"),
        ({"max_consecutive_skips": 1.5}, TypeError, "max_consecutive_skips must be an integer"),
        ({"inner": "adam"}, TypeError, "inner must be an Optax gradient transformation"),
    ],
)
def test_bad_arguments_are_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        ja.guard(**({"inner": optax.sgd(0.1)} | kwargs))


def test_a_state_that_the_guard_has_not_made_is_named():
    plain = optax.adam(0.1)
    with pytest.raises(TypeError, match=r"state is a tuple, which this guard has not made.*init"):
        ja.guard(plain).update(GOOD, plain.init(PARAMS), PARAMS)

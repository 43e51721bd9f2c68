"""Counters: exact beyond 32 bits, found anywhere, read as Python ints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja
from jax_accum import _counts

W = {"w": jnp.ones(2)}


@pytest.mark.parametrize(
    "n",
    [0, 1, 2**24 + 1, 2**31, 2**32 - 1, 2**32, 3 * 10**9, 10**15 + 7],
)
def test_numbers_known_to_python_are_exact_at_any_size(n):
    assert _counts.to_ints(_counts.seen_in(n, np.int64(n), n)) == [n, n, n]


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (jnp.float32(2**33), 2**33),
        (jnp.float32(2.5e9), 2_500_000_000),
        (jnp.float16(1000), 1000),
        (jnp.bfloat16(384), 384),
        (jnp.uint32(2**32 - 1), 2**32 - 1),
        (jnp.int8(100), 100),
        (jnp.float32(1.6), 2),
        (jnp.float32(-3), 0),
        (jnp.float32(jnp.nan), 0),
        (jnp.int32(-3), 0),
        (jnp.bool_(True), 1),
    ],
    ids=str,
)
def test_traced_numbers_are_rounded_and_what_is_none_counts_nothing(value, want):
    seen = jax.jit(lambda n: _counts.seen_in(n, None, n))(value)
    assert _counts.to_ints(seen) == [want, 0, want]


def test_64_bit_integers_are_exact(x64):
    seen = jax.jit(lambda n: _counts.seen_in(n, n, n))(jnp.int64(10**15 + 7))
    assert _counts.to_ints(seen) == [10**15 + 7] * 3


def test_a_carry_passes_from_the_low_word_to_the_high_one_wherever_it_falls():
    total = jax.jit(_counts.add)
    for a, b in ((2**32 - 1, 1), (2**32 - 1, 2**32 - 1), (2**31, 2**31), (7, 2**33 - 3)):
        words = [_counts.seen_in(n, 0, n) for n in (a, b)]
        assert _counts.to_ints(total(*words)) == [a + b, 0, a + b]


def test_a_sum_over_replicas_carries_as_well():
    numbers = [2**32 - 1, 2**32 - 2, 5, 10**12]
    stacked = jax.tree.map(
        lambda *words: jnp.stack(words), *[_counts.seen_in(n, 1, 0) for n in numbers]
    )
    summed = jax.vmap(lambda words: _counts.psum(words, "r"), axis_name="r")(stacked)
    assert _counts.to_ints(summed) == [sum(numbers), 4, 0]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_trillions_of_tokens_neither_wrap_nor_stall(jitted):
    opt = ja.MultiSteps(optax.sgd(0.1), 2)
    call = lambda s, w: opt.update(W, s, W, weight=w)[1]  # noqa: E731
    call = jax.jit(call) if jitted else call
    state = opt.init(W)
    big = counts_at(10**13)
    state = state._replace(counts=big)
    for _ in range(3):
        state = call(state, 3_000_000_000.0)
    assert ja.counts(state)["tokens"] == 10**13 + 9_000_000_000
    assert ja.counts(state)["microbatches"] == 10**13 + 3


def counts_at(n):
    high, low = divmod(n, 2**32)
    size = len(_counts.NAMES)
    return _counts.Counts(jnp.full(size, low, jnp.uint32), jnp.full(size, high, jnp.uint32))


def test_the_counter_of_updates_goes_on_past_2_to_the_32():
    opt = ja.MultiSteps(ja.guard(optax.sgd(0.1)), 1)
    state = opt.init(W)
    state = state._replace(
        counts=counts_at(2**32 - 1),
        inner_opt_state=state.inner_opt_state._replace(counts=counts_at(2**32 - 1)),
        gradient_step=jnp.int32(2**31 - 1),
    )
    _, state = opt.update(W, state, W)
    assert ja.counts(state)["updates"] == 2**32
    assert opt.has_updated(state)
    assert int(state.gradient_step) == 2**31 - 1


def test_the_open_group_is_counted_with_the_closed_ones():
    opt = ja.MultiSteps(optax.sgd(0.1), 2)
    state = opt.init(W)
    for n in range(1, 4):
        _, state = opt.update(W, state, W, weight=10, examples=3)
        counts = ja.counts(state)
        assert (counts["microbatches"], counts["examples"], counts["tokens"]) == (n, 3 * n, 10 * n)
        assert counts["attempts"] == n // 2


def test_a_microbatch_may_stand_for_several_and_its_weight_need_not_be_tokens():
    opt = ja.MultiSteps(optax.sgd(0.1), 2)
    _, state = opt.update(W, opt.init(W), W, weight=0.25, microbatches=4, tokens=100)
    counts = ja.counts(state)
    assert (counts["microbatches"], counts["tokens"]) == (4, 100)


def test_models_side_by_side_under_vmap_are_not_added_up():
    opt = ja.MultiSteps(optax.sgd(0.1), 2)
    params = {"w": jnp.ones((3, 2))}
    state = jax.vmap(opt.init)(params)
    for n in (1, 2, 3):
        _, state = jax.vmap(lambda g, s: opt.update(g, s, weight=5))(params, state)
        assert ja.counts(state)["tokens"] == 5 * n
    uneven = state._replace(counts=state.counts._replace(low=state.counts.low.at[0, 0].add(1)))
    with pytest.raises(ValueError, match="differ along a leading axis"):
        ja.counts(uneven)


def test_a_state_without_counters_and_states_that_disagree_are_errors():
    with pytest.raises(ValueError, match="holds no counters"):
        ja.counts(optax.adam(0.1).init(W))
    one = ja.guard(optax.sgd(0.1))
    fresh = one.init(W)
    _, used = one.update(W, fresh)
    with pytest.raises(ValueError, match="2 sets of counters side by side that disagree"):
        ja.counts((fresh, used))

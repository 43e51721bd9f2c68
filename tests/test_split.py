"""The split: which rows form a microbatch, what is shared, and what is grouped already."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_accum as ja


@hypothesis.given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_every_row_is_in_one_microbatch_and_stays_in_the_block_of_its_replica(m, a, d):
    rows = ja.microbatch_rows(m * a * d, microbatches=a, replicas=d)
    assert rows.shape == (a, d, m)
    assert sorted(rows.ravel()) == list(range(m * a * d))
    assert (rows // (m * a) == np.arange(d)[:, None]).all()
    assert (np.diff(rows.swapaxes(0, 1).reshape(d, -1)) == 1).all()  # in order on each


def seen_rows(microbatches, batch, **options):
    """The row numbers that each call of the loss function is given."""

    def loss_fn(w, part):
        return ja.Weighted(w * jnp.sum(part["row"]), 1), part["row"]

    fn = ja.accumulated_value_and_grad(loss_fn, microbatches, has_aux=True, **options)
    (_, info), _ = jax.jit(fn)(jnp.float32(1), batch)
    return info.aux


def test_the_rows_that_the_indices_tell_are_those_that_are_taken():
    batch = {"row": np.arange(12)}
    assert (seen_rows(4, batch) == ja.microbatch_rows(12, 4)[:, 0]).all()


def test_a_grouped_batch_is_taken_as_it_is():
    rows = np.random.default_rng(0).permutation(12).reshape(4, 3)
    assert (seen_rows(None, {"row": rows}) == rows).all()


def test_what_is_marked_as_shared_is_whole_in_every_microbatch_though_its_size_matches():
    def loss_fn(w, part):
        assert part["table"].shape == (4,)
        assert part["nested"]["scalar"].shape == ()
        picked = part["table"][part["row"]] * part["nested"]["scalar"]
        return ja.Weighted(w * jnp.sum(picked), picked.size)

    batch = {
        "row": np.array([3, 2, 1, 0]),
        "table": np.float32([1, 10, 100, 1000]),
        "nested": {"scalar": np.float32(2)},
    }
    axes = {"row": 0, "table": None, "nested": None}
    fn = ja.accumulated_value_and_grad(loss_fn, 2, batch_axes=axes)
    assert jax.jit(fn)(jnp.float32(1), batch)[1] == 2 * 1111 / 4


def test_shared_arguments_behind_the_batch_are_handed_on():
    fn = ja.accumulated_value_and_grad(
        lambda w, batch, rate: ja.Weighted(w * rate * jnp.sum(batch), batch.size), 2
    )
    assert jax.jit(fn)(jnp.float32(1), np.float32([1, 2, 3, 6]), np.float32(10))[1] == 30


@pytest.mark.parametrize(("how", "want"), [("sum", 9), ("mean", 2), ("last", 7)])
def test_auxiliary_output_is_summed_averaged_by_weight_or_the_last(how, want):
    def loss_fn(w, batch):
        return ja.Weighted(w, jnp.sum(batch["weight"])), jnp.sum(batch["x"])

    batch = {"x": np.float32([1, 1, 7]), "weight": np.float32([4, 1, 1])}
    fn = ja.accumulated_value_and_grad(loss_fn, 3, has_aux=True, aux=how)
    (_, info), _ = jax.jit(fn)(jnp.float32(1), batch)
    assert info.aux == want


def test_three_microbatches_draw_three_masks():
    def loss_fn(w, batch, key):
        mask = jax.random.bernoulli(key, 0.5, (64,))
        return ja.Weighted(w * jnp.sum(batch), 1), mask

    fn = ja.accumulated_value_and_grad(loss_fn, 3, has_aux=True)
    (_, info), _ = jax.jit(fn)(jnp.float32(1), np.ones(3, np.float32), key=jax.random.key(0))
    assert len({mask.tobytes() for mask in np.asarray(info.aux)}) == 3


def test_state_is_handed_on_in_order():
    def loss_fn(w, batch, state):
        return ja.Weighted(w, 1), 10 * state + batch[0]

    fn = ja.accumulated_value_and_grad(loss_fn, 3, has_state=True)
    (_, info), _ = jax.jit(fn)(jnp.float32(1), np.array([1, 2, 3]), state=jnp.int32(0))
    assert info.state == 123

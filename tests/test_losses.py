"""Losses: targets are counted once, masked positions have gradient 0, bad labels are not hidden."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_accum as ja

cross_entropy, next_token = ja.losses.softmax_cross_entropy, ja.losses.next_token_cross_entropy


def oracle(logits, labels, smoothing=0.0, z=0.0):
    """Sum over labels of at least 0, in float64, by the definition."""
    x = np.asarray(logits, np.float64)
    log_z = np.log(np.exp(x).sum(-1))
    log_p = x - log_z[..., None]
    total = 0.0
    for at in np.argwhere(labels >= 0):
        at = tuple(at)
        total += -(1 - smoothing) * log_p[at][labels[at]] - smoothing * log_p[at].mean()
        total += z * log_z[at] ** 2
    return total


RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 5, 7)).astype(np.float32)
LABELS = np.where(RNG.random((4, 5)) < 0.3, -100, RNG.integers(0, 7, (4, 5)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("z", [0.0, 1e-2])
def test_the_sum_and_the_number_of_supervised_labels(smoothing, z):
    loss = cross_entropy(LOGITS, LABELS, label_smoothing=smoothing, z_loss=z)
    np.testing.assert_allclose(loss.total, oracle(LOGITS, LABELS, smoothing, z), rtol=1e-6)
    assert (loss.weight, loss.weight.dtype) == ((LABELS >= 0).sum(), jnp.int32)


def test_a_mask_and_an_ignored_label_both_take_a_position_away():
    mask = RNG.random((4, 5)) < 0.5
    loss = cross_entropy(LOGITS, LABELS, mask=mask)
    both = np.where(mask, LABELS, -100)
    assert loss.weight == (both >= 0).sum()
    np.testing.assert_allclose(loss.total, oracle(LOGITS, both), rtol=1e-6)


def test_masked_positions_have_gradient_0_whatever_their_logits_hold():
    logits = np.where(LABELS[..., None] < 0, np.nan, LOGITS)
    loss, grad = jax.value_and_grad(lambda x: cross_entropy(x, LABELS).total)(logits)
    np.testing.assert_allclose(loss, oracle(LOGITS, LABELS), rtol=1e-6)
    assert (np.asarray(grad)[LABELS < 0] == 0).all()
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("label", [7, -1, 1000])
def test_a_label_out_of_range_makes_the_total_nan_and_is_not_clipped(label):
    labels = np.where(np.arange(20).reshape(4, 5) == 3, label, LABELS)
    assert np.isnan(cross_entropy(LOGITS, labels).total)
    assert (
        np.isfinite(cross_entropy(LOGITS, labels, ignore_index=label).total) == (LABELS >= 0).all()
    )


def test_16_bit_logits_are_computed_with_in_float32_and_float64_kept(x64):
    assert cross_entropy(jnp.asarray(LOGITS, jnp.bfloat16), LABELS).total.dtype == jnp.float32
    loss = cross_entropy(np.float64(LOGITS), LABELS)
    assert loss.total.dtype == jnp.float64
    np.testing.assert_allclose(loss.total, oracle(LOGITS, LABELS), rtol=1e-13)


def test_one_row_of_5_tokens_has_4_targets_each_held_against_the_token_after_it():
    tokens = np.array([[5, 6, 0, 1, 2]])
    loss = next_token(LOGITS[:1], tokens)
    assert loss.weight == 4
    want = oracle(LOGITS[:1, :-1], tokens[:, 1:])
    np.testing.assert_allclose(loss.total, want, rtol=1e-6)


def test_in_a_packed_row_of_3_documents_each_boundary_is_subtracted_once():
    tokens = RNG.integers(0, 7, (1, 9))
    documents = np.array([[1, 1, 1, 2, 2, 3, 3, 3, 0]])  # 2 + 1 + 2 targets; 0 is padding
    logits = RNG.normal(size=(1, 9, 7)).astype(np.float32)
    loss = next_token(logits, tokens, segment_ids=documents)
    assert loss.weight == 5
    apart = [next_token(logits[:, a:b], tokens[:, a:b]) for a, b in ((0, 3), (3, 5), (5, 8))]
    np.testing.assert_allclose(loss.total, sum(float(part.total) for part in apart), rtol=1e-6)


def test_the_first_column_of_a_mask_is_never_a_target():
    tokens = RNG.integers(0, 7, (1, 5))
    first, second = np.eye(5, dtype=bool)[None, :2].swapaxes(0, 1)
    assert next_token(LOGITS[:1], tokens, mask=first).weight == 0
    assert next_token(LOGITS[:1], tokens, mask=second).weight == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cross_entropy(LABELS, LABELS), TypeError, "logits must be floating, got int"),
        (lambda: cross_entropy(LOGITS, LOGITS[..., 0]), TypeError, "labels must be integer"),
        (lambda: cross_entropy(LOGITS, LABELS[:2]), ValueError, "labels must have the shape"),
        (lambda: cross_entropy(LOGITS, LABELS, mask=LABELS[0] > 0), ValueError, "mask must have"),
        (lambda: cross_entropy(LOGITS, LABELS, label_smoothing=2), ValueError, "label_smoothing"),
        (lambda: cross_entropy(LOGITS, LABELS, z_loss=-1), ValueError, "z_loss must be at least"),
        (lambda: next_token(LOGITS[:, :-1], LABELS), ValueError, "The shift by one is done here"),
        (lambda: next_token(LOGITS[:, :1], LABELS[:, :1]), ValueError, "needs two tokens"),
        (lambda: next_token(LOGITS, LABELS, segment_ids=LABELS[0]), ValueError, "segment_ids must"),
    ],
    ids=[
        "integer logits",
        "floating labels",
        "labels of another shape",
        "a mask of another shape",
        "smoothing above 1",
        "a negative z-loss",
        "logits shifted already",
        "rows of one token",
        "segments of another shape",
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()

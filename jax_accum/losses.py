"""Losses that return `Weighted`: a sum over supervised tokens, and their number.

Shapes, one letter an axis: B rows, T tokens in a row, V entries of the vocabulary,
`...` any leading axes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_accum._chunked import chunked_next_token_cross_entropy
from jax_accum._weighted import Weighted

__all__ = ["chunked_next_token_cross_entropy", "next_token_cross_entropy", "softmax_cross_entropy"]


def softmax_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    mask: jax.Array | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Weighted:
    r"""Cross entropy of integer labels, summed over the supervised positions.

    For a supervised position with logits :math:`x`, label :math:`y`, smoothing
    :math:`\epsilon` and z-loss coefficient :math:`\zeta`,

    .. math::
      -(1-\epsilon) \log p_y - \frac{\epsilon}{V} \sum_v \log p_v
      + \zeta \, \bigl(\log \textstyle\sum_v e^{x_v}\bigr)^2,
      \qquad \log p_v = x_v - \log \textstyle\sum_u e^{x_u}.

    Positions that are not supervised add nothing to the sum, to the weight or to
    the gradient, whatever their logits hold.

    Args:
      logits: `[..., V]`, floating. 16-bit logits are computed with in float32.
      labels: `[...]`, integer, in `[0, V)` where supervised. A label outside that
        range at a supervised position makes the total NaN: it is never clipped.
      mask: `[...]`, boolean or 0 and 1: which positions are supervised. All, if not given.
      ignore_index: positions with this label are not supervised either; `None` for no such label.
      label_smoothing: :math:`\epsilon`, in `[0, 1]`.
      z_loss: :math:`\zeta`, at least 0. The term shares the denominator of the cross entropy.

    Returns:
      `Weighted`: the sum (float32, or float64 for float64 logits) and the number
      of supervised positions (int32).

    Raises:
      TypeError: logits are not floating, or labels not integer.
      ValueError: shapes do not belong together, or a coefficient is out of range.

    References:
      Label smoothing: Szegedy et al., https://arxiv.org/abs/1512.00567, section 7.
      z-loss: Chowdhery et al., https://arxiv.org/abs/2204.02311, section 5.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = softmax_cross_entropy(jnp.zeros((3, 4)), jnp.array([0, 3, -100]))
      >>> int(loss.weight), round(float(loss.mean), 4)  # log 4
      (2, 1.3863)
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floating, got {logits.dtype}.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"labels must be integers (indices into the last axis), got {labels.dtype}."
        )
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of logits without the last axis, {logits.shape[:-1]}; "
            f"got {labels.shape}."
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}.")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss must be at least 0 and finite, got {z_loss}.")
    supervised = _as_mask(mask, labels.shape)
    if ignore_index is not None:
        supervised &= labels != ignore_index

    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # `where` on the way in: the gradient of a masked position is then an exact 0
    # even where its logits are inf or NaN.
    x = jnp.where(supervised[..., None], x, 0)
    vocabulary = x.shape[-1]
    in_range = (labels >= 0) & (labels < vocabulary)
    log_z = jax.nn.logsumexp(x, axis=-1)
    at_label = jnp.take_along_axis(x, jnp.where(in_range, labels, 0)[..., None], axis=-1)[..., 0]
    loss = log_z - (1 - label_smoothing) * at_label
    if label_smoothing:
        loss -= label_smoothing * jnp.mean(x, axis=-1)
    if z_loss:
        loss += z_loss * jnp.square(log_z)
    loss = jnp.where(in_range, loss, jnp.nan)
    return Weighted(jnp.sum(jnp.where(supervised, loss, 0)), jnp.sum(supervised, dtype=jnp.int32))


def next_token_cross_entropy(
    logits: jax.Array,
    tokens: jax.Array,
    *,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Weighted:
    """Cross entropy of each token given those before it, summed over the targets.

    The shift happens here and only here: the logits at `t` are held against the
    token at `t + 1`, so a row of T tokens has T - 1 targets. Hand over the tokens
    as they are, not shifted labels.

    Args:
      logits: `[B, T, V]`, floating.
      tokens: `[B, T]`, integer: the very tokens that the model read.
      mask: `[B, T]`: which tokens are supervised *as targets*. The first column
        is never one, whatever it says.
      segment_ids: `[B, T]`, integer: the document that a token belongs to, in a
        packed row. A target whose predecessor is of another document is not
        supervised, so a boundary takes away exactly one. Segment 0 is padding.
      ignore_index: tokens with this value are not targets; `None` for no such value.
      label_smoothing: as in `softmax_cross_entropy`.
      z_loss: as in `softmax_cross_entropy`.

    Returns:
      `Weighted`: the sum, and the number of targets (int32).

    Raises:
      TypeError: as `softmax_cross_entropy`.
      ValueError: shapes do not belong together, or rows of fewer than two tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> tokens = jnp.array([[5, 6, 7, 1, 2]])
      >>> int(next_token_cross_entropy(jnp.zeros((1, 5, 8)), tokens).weight)
      4
      >>> two_documents = jnp.array([[1, 1, 1, 2, 2]])
      >>> int(next_token_cross_entropy(
      ...     jnp.zeros((1, 5, 8)), tokens, segment_ids=two_documents).weight)
      3
    """
    logits, tokens = jnp.asarray(logits), jnp.asarray(tokens)
    if tokens.ndim < 1 or logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits must have the shape of tokens and a vocabulary axis, {tokens.shape} + (V,); "
            f"got {logits.shape}. The shift by one is done here: pass both unshifted."
        )
    if tokens.shape[-1] < 2:
        raise ValueError(
            f"tokens has rows of {tokens.shape[-1]}: a row needs two tokens to hold a target."
        )
    supervised = _as_mask(mask, tokens.shape)[..., 1:]
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
        if segment_ids.shape != tokens.shape:
            raise ValueError(
                f"segment_ids must have the shape of tokens, {tokens.shape}; "
                f"got {segment_ids.shape}."
            )
        here, before = segment_ids[..., 1:], segment_ids[..., :-1]
        supervised &= (here == before) & (here != 0)
    return softmax_cross_entropy(
        logits[..., :-1, :],
        tokens[..., 1:],
        mask=supervised,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def _as_mask(mask: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    if mask is None:
        return jnp.ones(shape, bool)
    mask = jnp.asarray(mask)
    if mask.shape != shape:
        raise ValueError(f"mask must have the shape of the labels, {shape}; got {mask.shape}.")
    return mask != 0

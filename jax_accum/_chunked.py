"""Next-token cross entropy in chunks: the logits of a whole batch are never there at once.

Shapes, one letter an axis: B rows, T tokens in a row, C width, V entries of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_accum._checks import checked_int
from jax_accum._weighted import Weighted


class _Sums(NamedTuple):
    """What the loss of a position needs of its logits, `[...]` each."""

    log_z: jax.Array
    at_label: jax.Array
    mean: jax.Array


def chunked_next_token_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    *,
    chunks: int,
    over: str = "sequence",
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Weighted:
    r"""`next_token_cross_entropy` of `hidden @ head + bias`, in a fraction of its memory.

    The plain loss holds the logits, `[B, T, V]`, and their gradient. This one computes them in
    chunks, forgets each when its sums are known, and computes it again in the backward pass: one
    more matrix product with the head, for 1 / `chunks` of that memory.

    Over the sequence, a chunk is `[B, T / chunks, V]`. Over the vocabulary, it is
    `[B, T, V / chunks]`, and the normaliser :math:`\log \sum_v e^{x_v}` is kept up as chunks go by,
    relative to the largest logit so far. The sums are those of the plain loss in another order.

    Args:
      hidden: `[B, T, C]`, floating: what the output layer reads, at every position.
      head: `[C, V]`, the kernel of the output layer.
      tokens: `[B, T]`, integer: the very tokens that the model read; shifted here.
      chunks: how many; more of them need less memory, and more turns. What they do not divide
        evenly is padded.
      over: `"sequence"` or `"vocabulary"`.
      bias: `[V]`, if the output layer has one.
      mask: as in `next_token_cross_entropy`, and so are the arguments after it.
      segment_ids: see there.
      ignore_index: see there.
      label_smoothing: see there.
      z_loss: see there.

    Returns:
      `Weighted`: the sum, and the number of targets (int32).

    Raises:
      TypeError: arguments of the wrong type.
      ValueError: shapes do not belong together, rows of fewer than two tokens, more chunks than
        there is to cut, or an option out of range.

    References:
      The running normaliser: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.

    Example:
      >>> import jax.numpy as jnp, jax_accum as ja
      >>> hidden, head = jnp.ones((2, 5, 3)), jnp.eye(3, 8)
      >>> tokens = jnp.array([[1, 2, 3, 4, 5], [0, 0, 1, 1, 2]])
      >>> plain = ja.losses.next_token_cross_entropy(hidden @ head, tokens)
      >>> chunked = ja.losses.chunked_next_token_cross_entropy(hidden, head, tokens, chunks=2)
      >>> round(float(plain.mean), 5) == round(float(chunked.mean), 5), int(chunked.weight)
      (True, 8)
    """
    hidden, head, tokens = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(tokens)
    bias = None if bias is None else jnp.asarray(bias)
    _check(hidden, head, tokens, bias, over, label_smoothing, z_loss)
    chunks = checked_int(chunks, "chunks")
    targets, vocabulary = tokens.shape[1] - 1, head.shape[1]
    if chunks > (most := targets if over == "sequence" else vocabulary):
        raise ValueError(f"chunks={chunks} is more than the {most} entries of the {over} to cut.")
    labels = tokens[:, 1:]
    supervised = _supervised(tokens, mask, segment_ids, ignore_index)
    # Exact zeros in the gradient where nothing is supervised, even where the model gave NaN.
    hidden = jnp.where(supervised[..., None], hidden[:, :-1], 0)
    in_range = (labels >= 0) & (labels < vocabulary)
    safe = jnp.where(in_range & supervised, labels, 0)

    def position_loss(sums: _Sums) -> jax.Array:
        loss = sums.log_z - (1 - label_smoothing) * sums.at_label
        if label_smoothing:
            loss -= label_smoothing * sums.mean
        return loss + z_loss * jnp.square(sums.log_z) if z_loss else loss

    if over == "vocabulary":
        loss = position_loss(_over_vocabulary(hidden, head, bias, safe, chunks))
        loss = jnp.where(in_range, loss, jnp.nan)
        total = jnp.sum(jnp.where(supervised, loss, 0))
    else:

        @jax.checkpoint
        def of_chunk(head: Any, bias: Any, part: tuple[jax.Array, ...]) -> jax.Array:
            hidden, labels, in_range, supervised = part
            loss = position_loss(_sums(_logits(hidden, head, bias, supervised), labels))
            loss = jnp.where(in_range, loss, jnp.nan)
            return jnp.sum(jnp.where(supervised, loss, 0))

        parts = tuple(_cut(x, chunks) for x in (hidden, safe, in_range, supervised))
        wide = _wide(hidden, head, bias)
        total, _ = jax.lax.scan(
            lambda total, part: (total + of_chunk(head, bias, part), None),
            jnp.zeros((), wide),
            parts,
        )
    return Weighted(total, jnp.sum(supervised, dtype=jnp.int32))


def _logits(hidden: Any, head: Any, bias: Any, supervised: Any = None) -> jax.Array:
    x = hidden @ head
    x = x if bias is None else x + bias
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x if supervised is None else jnp.where(supervised[..., None], x, 0)


def _wide(*arrays: Any) -> Any:
    """The type that logits are computed with: at least float32."""
    return jnp.promote_types(jnp.result_type(*(x for x in arrays if x is not None)), jnp.float32)


def _sums(x: jax.Array, labels: jax.Array) -> _Sums:
    at_label = jnp.take_along_axis(x, labels[..., None], axis=-1)[..., 0]
    return _Sums(jax.nn.logsumexp(x, axis=-1), at_label, jnp.mean(x, axis=-1))


def _cut(x: jax.Array, chunks: int) -> jax.Array:
    """`[B, T, ...]` to `[chunks, B, ceil(T / chunks), ...]`, padded with zeros: not supervised."""
    size = -(-x.shape[1] // chunks)
    x = jnp.pad(x, [(0, 0), (0, size * chunks - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)


def _over_vocabulary(hidden: Any, head: Any, bias: Any, labels: Any, chunks: int) -> _Sums:
    """The sums of all positions, gathered chunk of the vocabulary by chunk."""
    vocabulary = head.shape[1]
    size = -(-vocabulary // chunks)
    padding = size * chunks - vocabulary
    heads = jnp.pad(head, ((0, 0), (0, padding))).reshape(-1, chunks, size)
    heads = jnp.moveaxis(heads, 1, 0)
    biases = None if bias is None else jnp.pad(bias, (0, padding)).reshape(chunks, size)

    @jax.checkpoint
    def turn(carry: tuple[Any, ...], part: tuple[Any, ...]) -> tuple[Any, ...]:
        largest, total, at_label, added = carry
        start, head, bias = part
        x = _logits(hidden, head, bias)
        real = start + jnp.arange(size) < vocabulary
        added += jnp.sum(jnp.where(real, x, 0), axis=-1)
        x = jnp.where(real, x, -jnp.inf)
        # Its derivative cancels; the largest of all but the padding, which is never all there is.
        new = jax.lax.stop_gradient(jnp.maximum(largest, jnp.max(x, axis=-1)))
        total = total * jnp.exp(largest - new) + jnp.sum(jnp.exp(x - new[..., None]), axis=-1)
        here = (labels >= start) & (labels < start + size)
        index = jnp.where(here, labels - start, 0)
        found = jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
        return new, total, at_label + jnp.where(here, found, 0), added

    wide = _wide(hidden, head, bias)
    zeros = jnp.zeros(labels.shape, wide)
    carry = (jnp.full(labels.shape, jnp.finfo(wide).min), zeros, zeros, zeros)
    starts = size * jnp.arange(chunks)
    carry, _ = jax.lax.scan(lambda c, p: (turn(c, p), None), carry, (starts, heads, biases))
    largest, total, at_label, added = carry
    return _Sums(jnp.log(total) + largest, at_label, added / vocabulary)


def _supervised(tokens: Any, mask: Any, segment_ids: Any, ignore_index: int | None) -> jax.Array:
    """`[B, T - 1]`: which targets count."""
    found = jnp.ones(tokens.shape, bool)[:, 1:]
    if mask is not None:
        mask = jnp.asarray(mask)
        _require_shape("mask", mask, tokens.shape)
        found = mask[:, 1:] != 0
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
        _require_shape("segment_ids", segment_ids, tokens.shape)
        found &= (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return found if ignore_index is None else found & (tokens[:, 1:] != ignore_index)


def _check(
    hidden: Any, head: Any, tokens: Any, bias: Any, over: str, smoothing: float, z_loss: float
) -> None:
    for name, x in (("hidden", hidden), ("head", head)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating, got {x.dtype}.")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens must be integers, got {tokens.dtype}.")
    if hidden.ndim != 3 or head.ndim != 2 or hidden.shape[2] != head.shape[0]:
        raise ValueError(
            f"hidden must be [B, T, C] and head [C, V], got {hidden.shape} and {head.shape}. Pass "
            "what the output layer reads, not logits."
        )
    _require_shape("tokens", tokens, hidden.shape[:2])
    if bias is not None:
        _require_shape("bias", bias, head.shape[1:])
    if tokens.shape[1] < 2:
        raise ValueError(
            f"tokens has rows of {tokens.shape[1]}: a row needs two tokens to hold a target."
        )
    if over not in ("sequence", "vocabulary"):
        raise ValueError(f"over must be 'sequence' or 'vocabulary', got {over!r}.")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {smoothing}.")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss must be at least 0 and finite, got {z_loss}.")


def _require_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}.")

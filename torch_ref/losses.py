"""Losses that return a sum and what it is divided by, never a mean.

The fact they stand for: a mean of one microbatch cannot be put right afterwards, a sum and its
weight can. Every loss here counts its own supervised tokens, so that the accumulation loop divides
once, by the tokens of the group.

Shape legend: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Weighted(NamedTuple):
    """A loss term of one microbatch: a sum, and the weight it is divided by.

    ``total`` is a scalar of at least float32 that carries the graph. ``weight`` is a scalar (an
    int64 count from the losses here) that must not depend on parameters.

    >>> Weighted(torch.tensor(6.0), torch.tensor(4)).mean
    tensor(1.5000)
    >>> Weighted(torch.tensor(float("nan")), torch.tensor(0)).mean
    tensor(0.)
    """

    total: Tensor
    weight: Tensor

    @property
    def mean(self) -> Tensor:
        """``total / weight``, and 0 where nothing was supervised."""
        empty = self.weight == 0
        # Both sides of the division are made safe first: a NaN that is masked only after it was
        # computed still reaches the gradient.
        total = torch.where(empty, torch.zeros_like(self.total), self.total)
        return total / torch.where(empty, torch.ones_like(self.weight), self.weight)


def softmax_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Weighted:
    """Summed cross entropy of the supervised positions, and their number.

    For a supervised position with probabilities p and label y::

        (1 - label_smoothing) * -log p_y  +  label_smoothing * mean_v(-log p_v)
            +  z_loss * logsumexp(logits)^2

    (label smoothing: Szegedy et al., 2016, section 7; z-loss: Chowdhery et al., 2022, section 5).
    Both extras belong to the same positions as the cross entropy and share its weight, so they too
    are the same for every way of cutting a batch into microbatches.

    Args:
      logits: ``[..., V]``, floating. Narrower than float32 is computed in float32.
      labels: ``[...]``, integer, in ``[0, V)`` or equal to ``ignore_index``.
      mask: ``[...]``, bool or integers (0: not supervised); default supervised everywhere.
      ignore_index: label of positions that are not supervised; None for no such label.
      label_smoothing: share given to the uniform distribution, in ``[0, 1]``.
      z_loss: coefficient of the squared log normaliser, at least 0.

    Returns:
      `Weighted`: total of dtype float32 (float64 for float64 logits), weight int64 in tokens.
      With nothing supervised both are 0 and the gradient is 0, whatever the logits hold.

    Raises:
      TypeError: logits are not floating, labels not integers, or mask neither bool nor integers.
      ValueError: shapes do not fit, a label is out of range, or a coefficient is.

    >>> loss = softmax_cross_entropy(torch.zeros(3, 4), torch.tensor([1, 2, -100]))
    >>> loss.weight.item(), round(loss.mean.item(), 4)  # log 4
    (2, 1.3863)
    """
    _check(logits, labels, mask, label_smoothing, z_loss)
    supervised = _as_mask(mask, labels)
    if ignore_index is not None:
        supervised = supervised & (labels != ignore_index)
    chosen = torch.where(supervised, labels, 0).long()
    if chosen.numel() and not 0 <= chosen.min() <= chosen.max() < logits.shape[-1]:
        raise ValueError(
            f"labels must lie in [0, {logits.shape[-1]}) where supervised, got "
            f"{chosen.min().item()} to {chosen.max().item()}: set the others to "
            f"ignore_index={ignore_index} or mask them"
        )

    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Ignored positions get logits of 0 before anything is computed from them: an inf in there
    # would turn into NaN in the gradient even though its loss is dropped below.
    logits = torch.where(supervised.unsqueeze(-1), logits, 0)
    log_z = torch.logsumexp(logits, dim=-1)
    nll = log_z - logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    per_token = nll
    if label_smoothing:
        uniform = log_z - logits.mean(dim=-1)
        per_token = (1 - label_smoothing) * nll + label_smoothing * uniform
    if z_loss:
        per_token = per_token + z_loss * log_z.square()
    return Weighted(torch.where(supervised, per_token, 0).sum(), supervised.sum())


def next_token_targets(
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    ignore_index: int | None = -100,
) -> Tensor:
    """Which of the ``T - 1`` next-token targets of each row are supervised, ``[B, T - 1]`` bool.

    Needs no logits: this is how a group's denominator is known before its first forward pass.
    Arguments and errors as in `next_token_cross_entropy`.

    >>> packed = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 0]])  # 3 documents, then padding
    >>> next_token_targets(torch.ones(1, 9, dtype=torch.long), segment_ids=packed).sum().item()
    5
    """
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [B, T], got shape {tuple(tokens.shape)}: one row each")
    for name, value in (("mask", mask), ("segment_ids", segment_ids)):
        if value is not None and value.shape != tokens.shape:
            raise ValueError(
                f"{name} must have the shape of tokens, {tuple(tokens.shape)}, got "
                f"{tuple(value.shape)}: do not shift it, the loss does"
            )
    supervised = _as_mask(mask, tokens)[:, 1:]
    if ignore_index is not None:
        supervised = supervised & (tokens[:, 1:] != ignore_index)
    if segment_ids is not None:
        same_document = segment_ids[:, 1:] == segment_ids[:, :-1]
        supervised = supervised & same_document & (segment_ids[:, 1:] != 0)
    return supervised


def next_token_cross_entropy(
    logits: Tensor,
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Weighted:
    """Cross entropy of every position's logits against the token that follows it.

    The shift by one happens here and nowhere else: a row of T tokens has ``T - 1`` targets, and
    logits and tokens are both passed unshifted.

    Args:
      logits: ``[B, T, V]``, of the same positions as ``tokens``.
      tokens: ``[B, T]``, integer.
      mask: ``[B, T]``, bool or integers: which tokens are supervised as targets. Column 0 never is.
      segment_ids: ``[B, T]``, integer; the document of each token in a packed row, 0 for padding.
        A document's first token is no target, so each boundary costs one target.
      ignore_index: a token equal to it is no target.
      label_smoothing: as in `softmax_cross_entropy`.
      z_loss: as in `softmax_cross_entropy`.

    Returns:
      `Weighted`, its weight the number of supervised targets.

    Raises:
      TypeError, ValueError: as `softmax_cross_entropy`, and for shapes that do not fit.

    >>> loss = next_token_cross_entropy(torch.zeros(1, 5, 7), torch.tensor([[3, 1, 4, 1, 5]]))
    >>> loss.weight.item()
    4
    """
    supervised = next_token_targets(
        tokens, mask=mask, segment_ids=segment_ids, ignore_index=ignore_index
    )
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits must be [B, T, V] for tokens {tuple(tokens.shape)}, got "
            f"{tuple(logits.shape)}: pass both unshifted"
        )
    return softmax_cross_entropy(
        logits[:, :-1],
        tokens[:, 1:],
        mask=supervised,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def _as_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"mask must be bool or integers, got {mask.dtype}: it says which positions are "
            "supervised, not how much; pass mask != 0"
        )
    return mask != 0


def _check(
    logits: Tensor, labels: Tensor, mask: Tensor | None, label_smoothing: float, z_loss: float
) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating, got {logits.dtype}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}: pass class indices")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape of logits without its last axis, "
            f"{tuple(logits.shape[:-1])}, got {tuple(labels.shape)}"
        )
    if mask is not None and mask.shape != labels.shape:
        raise ValueError(
            f"mask must have the shape of labels, {tuple(labels.shape)}, got {tuple(mask.shape)}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"z_loss must be at least 0, got {z_loss}")

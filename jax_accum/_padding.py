"""What weighs nothing: leaves that say so, examples padded to a length, supervised tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_accum._checks import checked_int
from jax_accum._rows import Collate, named_leaves

Tree = Any


def with_mask(batch: Tree, padding: Mapping[str, Any], shape: tuple[int, ...]) -> Tree:
    """`batch` with a leaf that says what weighs nothing; a `mask` of `True` is added if missing.

    Raises:
      ValueError: a leaf named in `padding` is missing, and cannot be added.
    """
    if isinstance(batch, Mapping) and all(name in batch for name in padding):
        return batch
    names = [name for name, _ in named_leaves(batch)]
    missing = [name for name in padding if name not in names]
    if missing == ["mask"] and isinstance(batch, Mapping):
        return {**batch, "mask": np.ones(shape, bool)}
    if missing:
        raise ValueError(
            f"padding names {missing}, but a batch has the leaves {names}. Name the leaf that says "
            "what is supervised, and the value that says it is not: padding={'mask': 0}, "
            "padding={'labels': -100}, or by position padding={'1': -100} for a tuple."
        )
    return batch


def clear(batch: Tree, is_padding: np.ndarray, padding: Mapping[str, Any]) -> Tree:
    """`batch`, its leaves named in `padding` set where `is_padding`, `[A, rows]`; in place."""
    for name, leaf in named_leaves(batch):
        if name in padding:
            leaf[is_padding] = padding[name]
    return batch


def supervision(batch: Tree, padding: Mapping[str, Any]) -> np.ndarray:
    """The first leaf of `padding`, whose entries say what is supervised."""
    name = next(iter(padding))
    if isinstance(batch, Mapping) and name in batch:
        return batch[name]
    return dict(named_leaves(batch))[name]


def count_supervised(leaf: np.ndarray, fill: Any) -> np.ndarray:
    """Entries of a leaf that do not say padding, `[rows]`, int64."""
    is_one = ~np.isnan(leaf) if fill != fill else leaf != fill
    return is_one.reshape(len(leaf), -1).sum(axis=1, dtype=np.int64)


def next_token_targets(
    batch: Mapping[str, Any],
    *,
    tokens: str = "tokens",
    mask: str = "mask",
    segment_ids: str = "segment_ids",
    ignore_index: int | None = -100,
) -> np.ndarray:
    """Targets of each row, as `losses.next_token_cross_entropy` counts them; for `groups(weight=)`.

    Args:
      batch: NumPy arrays `[B, T]` by name. Mask and segment IDs are used where there are any.
        A mask may also be `[B]`: of whole rows.
      tokens: name of the tokens, integer.
      mask: name of the mask of tokens that are supervised as targets.
      segment_ids: name of the documents' numbers in packed rows; 0 is padding.
      ignore_index: tokens with this value are no targets.

    Returns:
      `[B]`, int64.

    Raises:
      ValueError: no such tokens.

    Example:
      >>> import numpy as np, jax_accum as ja
      >>> tokens = np.array([[5, 6, 7, 1, 2]])
      >>> ja.next_token_targets({"tokens": tokens}).tolist()
      [4]
      >>> ja.next_token_targets(
      ...     {"tokens": tokens, "segment_ids": np.array([[1, 1, 1, 2, 2]])}).tolist()
      [3]
    """
    if tokens not in batch:
        raise ValueError(f"tokens={tokens!r} is no leaf of the batch: it has {sorted(batch)}.")
    x = np.asarray(batch[tokens])
    is_target = np.ones(x[:, 1:].shape, bool)
    if ignore_index is not None:
        is_target &= x[:, 1:] != ignore_index
    if mask in batch:
        m = np.asarray(batch[mask])
        is_target &= (m[:, None] if m.ndim == 1 else m[:, 1:]) != 0
    if segment_ids in batch:
        s = np.asarray(batch[segment_ids])
        is_target &= (s[:, 1:] == s[:, :-1]) & (s[:, 1:] != 0)
    return is_target.sum(axis=1, dtype=np.int64)


def collate_to_lengths(lengths: Sequence[int], padding: Mapping[str, Any]) -> Collate:
    """Puts examples of varying length together, padded to the shortest length that holds all.

    Every leaf with axes is padded along its first, with its value in `padding` or 0; scalars
    are stacked as they are. A `mask` over positions is added if there is none.

    Raises:
      ValueError: lengths that do not rise; an example longer than the last.
    """
    steps = [checked_int(n, "lengths") for n in lengths]
    if not steps or sorted(set(steps)) != steps:
        raise ValueError(f"lengths must rise and not be empty, got {list(lengths)}.")

    def collate(
        names: Sequence[str], columns: Sequence[Sequence[np.ndarray]], ids: Sequence[Any]
    ) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        own = _lengths(names, columns, ids)
        longest = max(own)
        if longest > steps[-1]:
            raise ValueError(
                f"example {ids[own.index(longest)]!r} has length {longest}, and the largest of "
                f"lengths is {steps[-1]}: cut it, or add a length."
            )
        length = next(n for n in steps if n >= longest)
        leaves = [
            _padded(xs, length, padding.get(name, 0))
            for name, xs in zip(names, columns, strict=True)
        ]
        if "mask" in padding and "mask" not in names:
            return leaves, {"mask": np.arange(length) < np.array(own)[:, None]}
        return leaves, {}

    return collate


def _lengths(
    names: Sequence[str], columns: Sequence[Sequence[np.ndarray]], ids: Sequence[Any]
) -> list[int]:
    """The length of each example."""
    ragged = [(name, xs) for name, xs in zip(names, columns, strict=True) if xs[0].ndim]
    if not ragged:
        raise ValueError(f"lengths= needs a leaf with an axis, but examples have {list(names)}.")
    per_leaf = [[len(x) for x in xs] for _, xs in ragged]
    if any(other != per_leaf[0] for other in per_leaf):
        at = next(i for i, own in enumerate(zip(*per_leaf, strict=True)) if len(set(own)) > 1)
        own = {name: len(xs[at]) for name, xs in ragged}
        raise ValueError(
            f"example {ids[at]!r} has leaves of the lengths {own}: with lengths= all leaves of an "
            "example that have axes share one length."
        )
    return per_leaf[0]


def _padded(xs: Sequence[np.ndarray], length: int, fill: Any) -> np.ndarray:
    if xs[0].ndim == 0:
        return np.stack(xs)
    out = np.full((len(xs), length, *xs[0].shape[1:]), fill, xs[0].dtype)
    for row, x in zip(out, xs, strict=True):
        row[: len(x)] = x
    return out

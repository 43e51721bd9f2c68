"""Rows from a stream: batches or examples in, checked arrays of exactly so many rows out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Tree = Any


class Rows(NamedTuple):
    """Consecutive examples of a stream.

    Attributes:
      batch: tree of NumPy arrays, `[rows, ...]`.
      ids: an ID per row.
    """

    batch: Tree
    ids: list[Any]


class Leaf(NamedTuple):
    """What has to stay the same of a leaf from batch to batch."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """Leaves with names such as `inputs/tokens`, or `1` for the second of a tuple."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in pairs]


class RowReader:
    """Takes rows from a stream, as many at a time as are asked for.

    Args:
      stream: of batches (trees of arrays `[rows, ...]`), or of single examples.
      batched: whether it is of batches.
      ids: key of the leaf that holds the IDs, which is taken out; `None` numbers the examples.
      collate: puts single examples together; `np.stack` of every leaf by default.
    """

    def __init__(
        self,
        stream: Iterable[Tree],
        *,
        batched: bool,
        ids: str | None,
        collate: Callable[[Sequence[Tree], Sequence[Any]], Tree] | None = None,
    ) -> None:
        try:
            self._stream: Iterator[Tree] = iter(stream)
        except TypeError:
            raise TypeError(
                f"batches must be an iterable of {'batches' if batched else 'examples'}, got "
                f"{type(stream).__name__}."
            ) from None
        if isinstance(stream, Mapping):
            raise TypeError(
                "batches must be an iterable of batches, got one mapping: wrap it: [x]."
            )
        self._batched = batched
        self._ids = ids
        self._collate = collate
        self._like: list[Leaf] | None = None
        self._structure: Any = None
        self._parts: list[Rows] = []  # read, not taken; of examples, one at a time
        self._ready = 0
        self._items = 0  # batches or examples read
        self._numbered = 0
        self._seen: dict[Any, int] = {}

    def take(self, rows: int) -> Rows | None:
        """The next `rows` rows; fewer at the end of the stream, and `None` behind it.

        Raises:
          ValueError: a batch unlike the first, without IDs, or with an ID that was there before.
        """
        while self._ready < rows:
            try:
                item = next(self._stream)
            except StopIteration:
                break
            part = self._read(item)
            self._parts.append(part)
            self._ready += len(part.ids)
        if not self._ready:
            return None
        return self._cut(min(rows, self._ready))

    def _cut(self, rows: int) -> Rows:
        taken, ids = [], []
        missing = rows
        while missing:
            part = self._parts.pop(0)
            if len(part.ids) > missing:
                self._parts.insert(0, _slice(part, slice(missing, None)))
                part = _slice(part, slice(missing))
            taken.append(part.batch)
            ids += part.ids
            missing -= len(part.ids)
        self._ready -= rows
        if not self._batched:
            if self._collate is not None:
                return Rows(self._collate(taken, ids), ids)
            return Rows(jax.tree.map(lambda *xs: np.stack(xs), *taken), ids)
        if len(taken) == 1:
            return Rows(taken[0], ids)
        return Rows(jax.tree.map(lambda *xs: np.concatenate(xs), *taken), ids)

    def _read(self, item: Tree) -> Rows:
        what = f"{'batch' if self._batched else 'example'} {self._items}"
        item, own_ids = self._without_ids(item, what)
        item = jax.tree.map(lambda x: _as_numpy(x, what), item)
        leaves = named_leaves(item)
        if not leaves:
            raise ValueError(f"{what} holds no arrays.")
        rows = _leading(leaves, what) if self._batched else 1
        self._require_alike(item, leaves, what)
        if own_ids is None:
            found = list(range(self._numbered, self._numbered + rows))
        else:
            found = self._checked_ids(own_ids, rows, what)
        self._items += 1
        self._numbered += rows
        return Rows(item, found)

    def _without_ids(self, item: Tree, what: str) -> tuple[Tree, Any]:
        if self._ids is None:
            return item, None
        if not isinstance(item, Mapping) or self._ids not in item:
            has = f"the keys {sorted(map(str, item))}" if isinstance(item, Mapping) else "no keys"
            raise ValueError(
                f"{what} has no IDs: ids={self._ids!r} names a key of every "
                f"{what.split()[0]}, and this one has {has}. ids=None numbers the examples."
            )
        return {k: v for k, v in item.items() if k != self._ids}, item[self._ids]

    def _checked_ids(self, given: Any, rows: int, what: str) -> list[Any]:
        if self._batched:
            found = given.tolist() if hasattr(given, "tolist") else list(given)
            if len(found) != rows:
                raise ValueError(f"{what} has {len(found)} IDs for {rows} examples.")
        else:
            found = [given.item() if hasattr(given, "item") else given]
        for row, name in enumerate(found):
            if name is None:
                raise ValueError(f"{what} has no ID (None) in row {row}: give each example one.")
            number = self._numbered + row
            try:
                before = self._seen.setdefault(name, number)
            except TypeError:
                raise ValueError(
                    f"{what} has an ID of type {type(name).__name__}: use a str, int or tuple."
                ) from None
            if before != number:
                raise ValueError(
                    f"{what} repeats the ID {name!r}: it is that of the examples number {before} "
                    f"and {number} of this stream. Give every example an ID of its own, and call "
                    "groups once for each epoch."
                )
        return found

    def _require_alike(self, item: Tree, leaves: list[tuple[str, Any]], what: str) -> None:
        ragged = self._collate is not None  # which then looks at the shapes itself
        skip = 1 if self._batched or ragged else 0
        now = [Leaf(name, x.shape[skip:], x.dtype) for name, x in leaves]
        structure = jax.tree.structure(item)
        if self._like is None:
            self._like, self._structure = now, structure
        if structure != self._structure:
            raise ValueError(
                f"{what} has the leaves {[leaf.name for leaf in now]}, but the first one had "
                f"{[leaf.name for leaf in self._like]}: all must have the same structure."
            )
        for leaf, like in zip(now, self._like, strict=True):
            if leaf != like:
                raise ValueError(
                    f"leaf {leaf.name!r} of {what} has shape {('rows', *leaf.shape)} and dtype "
                    f"{leaf.dtype}, but the first one had {('rows', *like.shape)} and {like.dtype}."
                    " Groups have one shape: pad the examples to one length, or pass single "
                    "examples with batched=False and lengths=."
                )


def _slice(rows: Rows, which: slice) -> Rows:
    return Rows(jax.tree.map(lambda x: x[which], rows.batch), rows.ids[which])


def _as_numpy(x: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(x)
    except Exception as error:
        raise TypeError(f"{what} holds a {type(x).__name__}, which is no array: {error}") from error
    if array.dtype.kind in "OUS":
        raise TypeError(
            f"{what} holds {type(x).__name__} of dtype {array.dtype}, which no device can take. "
            "If these are the IDs, name their key: ids=."
        )
    return array


def _leading(leaves: list[tuple[str, np.ndarray]], what: str) -> int:
    sizes: dict[int, str] = {}
    for name, x in leaves:
        if x.ndim == 0:
            raise ValueError(
                f"leaf {name!r} of {what} is a scalar: a batch has a leading axis over examples. "
                "For a stream of single examples pass batched=False."
            )
        sizes.setdefault(x.shape[0], name)
    if len(sizes) > 1:
        found = ", ".join(f"{n} in {name!r}" for n, name in sizes.items())
        raise ValueError(f"the leaves of {what} differ in their number of rows: {found}.")
    return next(iter(sizes))

"""Rows from a stream: batches or examples in, checked arrays of exactly so many rows out."""

from __future__ import annotations

import collections
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


class Part(NamedTuple):
    """A batch that was read, or a single example, as its leaves."""

    leaves: list[np.ndarray]
    ids: list[Any]


Collate = Callable[
    [Sequence[str], Sequence[Sequence[np.ndarray]], Sequence[Any]],
    tuple[list[np.ndarray], dict[str, np.ndarray]],
]
"""From names of leaves, each leaf of all examples, and IDs: batched leaves, and more by name."""


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
      collate: puts single examples together, and may return more leaves if examples are dicts;
        `np.stack` of every leaf by default.
    """

    def __init__(
        self,
        stream: Iterable[Tree],
        *,
        batched: bool,
        ids: str | None,
        collate: Collate | None = None,
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
        self._kind = "batch" if batched else "example"
        self._ids = ids
        self._collate = collate
        self._names: list[str] = []
        self._like: list[tuple[tuple[int, ...], np.dtype]] = []
        self._structure: Any = None
        self._keys: list[str] = []  # of single examples that are flat dicts, in order of the leaves
        self._parts: collections.deque[Part] = collections.deque()  # read, and not taken
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
            part = (self._read_quickly(item) if self._keys else None) or self._read(item)
            self._parts.append(part)
            self._ready += len(part.ids)
        if not self._ready:
            return None
        return self._cut(min(rows, self._ready))

    def _cut(self, rows: int) -> Rows:
        taken: list[list[np.ndarray]] = []
        ids: list[Any] = []
        missing = rows
        while missing:
            part = self._parts.popleft()
            if len(part.ids) > missing:
                self._parts.appendleft(_slice(part, slice(missing, None)))
                part = _slice(part, slice(missing))
            taken.append(part.leaves)
            ids += part.ids
            missing -= len(part.ids)
        self._ready -= rows
        if len(taken) == 1 and self._batched:
            return Rows(jax.tree.unflatten(self._structure, taken[0]), ids)
        columns = list(zip(*taken, strict=True))
        if self._collate is not None:
            leaves, more = self._collate(self._names, columns, ids)
            batch = jax.tree.unflatten(self._structure, leaves)
            return Rows({**batch, **more} if isinstance(batch, dict) else batch, ids)
        together = np.concatenate if self._batched else np.stack
        return Rows(jax.tree.unflatten(self._structure, map(together, columns)), ids)

    def _read_quickly(self, item: Tree) -> Part | None:
        """A single example just like the first, which `_read` took; `None` leaves it to `_read`.

        A stream of examples is read one by one: what is generic there costs more than the
        training of a small model has time for.
        """
        if type(item) is not dict or len(item) != len(self._keys) + (self._ids is not None):
            return None
        skip = self._collate is not None
        leaves = []
        for key, (shape, dtype) in zip(self._keys, self._like, strict=True):
            x = item.get(key)
            if type(x) is not np.ndarray or x.dtype != dtype or x.shape[skip:] != shape:
                return None
            leaves.append(x)
        name = self._numbered if self._ids is None else item.get(self._ids)
        if self._ids is not None:
            name = name.item() if isinstance(name, np.integer) else name
            if type(name) not in (str, int) or name in self._seen:
                return None
            self._seen[name] = self._numbered
        self._items += 1
        self._numbered += 1
        return Part(leaves, [name])

    def _read(self, item: Tree) -> Part:
        own_ids = None
        if self._ids is not None:
            item, own_ids = self._without_ids(item)
        leaves, structure = jax.tree.flatten(item)
        leaves = [self._as_numpy(x) for x in leaves]
        if self._structure is None or structure != self._structure:
            self._first_or_other(item, structure)
        rows = self._rows(leaves)
        self._require_alike(leaves)
        if self._ids is None:
            found = list(range(self._numbered, self._numbered + rows))
        else:
            found = self._checked_ids(own_ids, rows)
        self._items += 1
        self._numbered += rows
        return Part(leaves, found)

    @property
    def _what(self) -> str:
        """What is being read, in words."""
        return f"{self._kind} {self._items}"

    def _first_or_other(self, item: Tree, structure: Any) -> None:
        """Takes the structure of the first item over, and refuses another."""
        names = [name for name, _ in named_leaves(item)]
        if self._structure is not None:
            raise ValueError(
                f"{self._what} has the leaves {names}, but the first one had {self._names}: all "
                "must have the same structure."
            )
        if not names:
            raise ValueError(f"{self._what} holds no arrays.")
        self._structure, self._names = structure, names
        if not self._batched and type(item) is dict and sorted(item) == names:
            self._keys = names

    def _without_ids(self, item: Tree) -> tuple[Tree, Any]:
        if not isinstance(item, Mapping) or self._ids not in item:
            has = f"the keys {sorted(map(str, item))}" if isinstance(item, Mapping) else "no keys"
            raise ValueError(
                f"{self._what} has no IDs: ids={self._ids!r} names a key of every "
                f"{self._kind}, and this one has {has}. ids=None numbers the examples."
            )
        rest = dict(item)
        return rest, rest.pop(self._ids)

    def _checked_ids(self, given: Any, rows: int) -> list[Any]:
        if self._batched:
            if not np.iterable(given):
                raise ValueError(
                    f"{self._what} has {given!r} for its IDs: give a list, one ID an example."
                )
            found = given.tolist() if hasattr(given, "tolist") else list(given)
            if len(found) != rows:
                raise ValueError(f"{self._what} has {len(found)} IDs for {rows} examples.")
        else:
            found = [given.item() if hasattr(given, "item") else given]
        for row, name in enumerate(found):
            if name is None:
                raise ValueError(
                    f"{self._what} has no ID (None) in row {row}: give each example one."
                )
            number = self._numbered + row
            try:
                before = self._seen.setdefault(name, number)
            except TypeError:
                raise ValueError(
                    f"{self._what} has an ID of type {type(name).__name__}: use a str, int or "
                    "tuple."
                ) from None
            if before != number:
                raise ValueError(
                    f"{self._what} repeats the ID {name!r}: it is that of the examples number "
                    f"{before} and {number} of this stream. Give every example an ID of its own, "
                    "and call groups once for each epoch."
                )
        return found

    def _require_alike(self, leaves: list[np.ndarray]) -> None:
        # Of examples that vary in length, collate looks at the first axis itself.
        skip = 1 if self._batched or self._collate is not None else 0
        now = [(x.shape[skip:], x.dtype) for x in leaves]
        if not self._like:
            self._like = now
        if now == self._like:
            return
        wrong = next(i for i, (a, b) in enumerate(zip(now, self._like, strict=True)) if a != b)
        (shape, dtype), (before, dtype_before) = now[wrong], self._like[wrong]
        rows = ("rows",) if self._batched else ()
        raise ValueError(
            f"leaf {self._names[wrong]!r} of {self._what} has shape {(*rows, *shape)} and dtype "
            f"{dtype}, but the first one had {(*rows, *before)} and {dtype_before}. Groups have "
            "one shape: pad the examples to one length, or pass single examples with "
            "batched=False and lengths=."
        )

    def _rows(self, leaves: list[np.ndarray]) -> int:
        """The number of rows of an item."""
        if not self._batched:
            return 1
        for name, x in zip(self._names, leaves, strict=True):
            if x.ndim == 0:
                raise ValueError(
                    f"leaf {name!r} of {self._what} is a scalar: a batch has a leading axis over "
                    "examples. For a stream of single examples pass batched=False."
                )
        if len({len(x) for x in leaves}) > 1:
            sizes = zip(self._names, leaves, strict=True)
            found = ", ".join(f"{len(x)} in {name!r}" for name, x in sizes)
            raise ValueError(f"the leaves of {self._what} differ in their number of rows: {found}.")
        return len(leaves[0])

    def _as_numpy(self, x: Any) -> np.ndarray:
        try:
            array = x if type(x) is np.ndarray else np.asarray(x)
        except Exception as error:
            raise TypeError(
                f"{self._what} holds a {type(x).__name__}, which is no array: {error}"
            ) from error
        if array.dtype.kind in "OUS":
            raise TypeError(
                f"{self._what} holds {type(x).__name__} of dtype {array.dtype}, which no device "
                "can take. If these are the IDs, name their key: ids=."
            )
        return array


def _slice(part: Part, which: slice) -> Part:
    return Part([x[which] for x in part.leaves], part.ids[which])

"""groups: from a stream of examples to groups of microbatches with a known end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_accum import _padding
from jax_accum._group import Dropped, Group
from jax_accum._plan import BatchPlan
from jax_accum._row_layout import RowLayout
from jax_accum._rows import RowReader, Rows

Tree = Any
POLICIES = ("keep", "drop", "error")
_logger = logging.getLogger("jax_accum")


def groups(
    batches: Iterable[Tree],
    plan: BatchPlan,
    last: str = "keep",
    *,
    batched: bool = True,
    ids: str | None = None,
    padding: Mapping[str, Any] | None = None,
    weight: Callable[[Tree], Any] | None = None,
    lengths: Sequence[int] | None = None,
    skip: int = 0,
    process_index: int | None = None,
    process_count: int | None = None,
) -> Groups:
    """One pass over a stream of examples, as groups of one update each, all of one shape.

    The examples are taken in the order of the stream, `plan.examples_per_update` at a time,
    wherever the batches of the stream end. What is left at its end never reaches the next
    epoch: call `groups` anew for each.

    Row `[a, d * m + i]` of a group is example number `microbatch_rows(n, A, D)[a, d, i]` of the
    group: what `make_train_step(loss_fn, tx, A, mesh=mesh)` would make of the flat batch. Hand
    it to `make_train_step(loss_fn, tx, None, mesh=mesh)`. A short group is laid out as a full
    one of as few microbatches as hold it, and padded: with rows at its end, copies of its last
    example that weigh nothing, and with whole microbatches of such rows, which
    `accumulated_value_and_grad` does not compute.

    With several processes each iterates over the same stream and gets the rows of its own
    replicas, `[A, m * D / processes, ...]`: process p has the replicas from `p * D / processes`
    on. IDs, counts and the denominator are those of the whole group in all of them.

    Args:
      batches: of trees of arrays `[rows, ...]`: NumPy, JAX or PyTorch (a list, a generator, a
        `DataLoader`, a Grain iterator). Rows may vary from batch to batch, nothing else. A group
        may hold views of these arrays: a stream that reuses its buffers has to copy them.
      plan: m, A and D.
      last: what becomes of a short group: `"keep"` trains it with its own denominator,
        `"drop"` leaves it out and says so in `.dropped`, `"error"` raises.
      batched: `False` for a stream of single examples.
      ids: key of the leaf that holds the IDs (str, int, or tuples of them). It is taken out of
        the batch; a loss that needs them, for `example_keys`, reads a leaf not named here. By
        default examples are numbered in the order of the stream.
      padding: names of the leaves that say what is supervised, and the values that say it is
        not: `{"labels": -100}`, `{"inputs/mask": 0}`, `{"1": -100}` for the second of a
        tuple. By default `{"mask": 0}`, a leaf that is added to a dict that lacks it:
        `True` for each row, or for each position with `lengths`.
      weight: `weight(batch) -> [rows]`, what each example adds to the denominator. By default
        the entries of the first leaf of `padding` that do not say padding;
        `next_token_targets` is for language models.
      lengths: with `batched=False`, lengths that examples of varying length are padded to: each
        group to the shortest that holds its longest example. Each length compiles once.
      skip: examples at the beginning that are passed over, already trained before a stop:
        `group.position` of the last group.
      process_index: which part to return, `jax.process_index()` by default.
      process_count: of how many, `jax.process_count()` by default.

    Returns:
      An iterator of `Group`, with the attribute `dropped`.

    Raises:
      TypeError: `batches` is no iterable, `plan` no `BatchPlan`, a leaf no array.
      ValueError: a policy unknown, a stream without examples, batches of changing structure or
        shape, IDs missing or repeated, a short group with `last="error"`, a weight that is
        negative or not finite, processes that do not divide the replicas.

    Example:
      >>> import numpy as np, jax_accum as ja
      >>> stream = [{"x": np.arange(3)}, {"x": np.arange(3, 5)}]
      >>> plan = ja.BatchPlan(microbatch_size=2, microbatches=2)
      >>> for group in ja.groups(stream, plan):
      ...     print(group.ids, group.partial, group.weight, group.batch["mask"].tolist())
      (0, 1, 2, 3) False 4 [[True, True], [True, True]]
      (4,) True 1 [[True, False], [False, False]]
    """
    if not isinstance(plan, BatchPlan):
        raise TypeError(f"plan must be a jax_accum.BatchPlan, got {type(plan).__name__}.")
    if last not in POLICIES:
        raise ValueError(f"last must be one of {', '.join(POLICIES)}, got {last!r}.")
    if lengths is not None and batched:
        raise ValueError("lengths= needs single examples: pass them with batched=False.")
    skip = _checked_skip(skip)
    padding = {"mask": 0} if padding is None else dict(padding)
    if not padding:
        raise ValueError("padding must name a leaf that says what is supervised, got none.")
    count = jax.process_count() if process_count is None else process_count
    index = jax.process_index() if process_index is None else process_index
    if plan.replicas % count:
        raise ValueError(
            f"{count} processes cannot share {plan.replicas} replicas evenly: choose a plan whose "
            f"replicas are a multiple of {count}."
        )
    if not 0 <= index < count:
        raise ValueError(f"process_index must be from 0 to {count - 1}, got {index}.")
    collate = None if lengths is None else _padding.collate_to_lengths(lengths, padding)
    reader = RowReader(batches, batched=batched, ids=ids, collate=collate)
    own = plan.replicas // count
    layout = RowLayout(plan, range(index * own, (index + 1) * own), padding, weight)
    return Groups(reader, layout, last, skip)


class Groups(Iterator[Group]):
    """What `groups` returns: an iterator over one pass of the stream.

    Attributes:
      dropped: what was left out at the end; known when the iterator has ended.
    """

    def __init__(self, reader: RowReader, layout: RowLayout, last: str, skip: int) -> None:
        self._reader = reader
        self._layout = layout
        self._last = last
        self._skip = skip
        self._position = 0
        self._ended = False
        self.dropped = Dropped(0, ())

    def __next__(self) -> Group:
        if self._ended:
            raise StopIteration
        self._pass_over()
        size = self._layout.plan.examples_per_update
        rows = self._reader.take(size)
        if rows is None or len(rows.ids) < size:
            self._ended = True
        if rows is None:
            if not self._position:
                raise ValueError(
                    "batches holds no examples. An iterator that was used up before gives none: "
                    "make a new one for each epoch."
                )
            raise StopIteration
        if len(rows.ids) < size and self._last != "keep":
            self._leave_out(rows)
            raise StopIteration
        self._position += len(rows.ids)
        return self._layout.group(rows, self._position)

    def _leave_out(self, rows: Rows) -> None:
        plan, n = self._layout.plan, len(rows.ids)
        if self._last == "error":
            raise ValueError(
                f"the stream ends with {n} of the {plan.examples_per_update} examples of a group "
                f"(IDs {_some(rows.ids)}). last='keep' trains them with their own denominator, "
                "last='drop' leaves them out."
            )
        self.dropped = Dropped(n, tuple(rows.ids))
        everything = " It was the only one: nothing is trained." if not self._position else ""
        _logger.warning(
            "dropped the last group: %d of %d examples.%s", n, plan.examples_per_update, everything
        )

    def _pass_over(self) -> None:
        while self._position < self._skip:
            rows = self._reader.take(min(self._skip - self._position, 1024))
            if rows is None:
                raise ValueError(
                    f"skip={self._skip}, but the stream has {self._position} examples: it is not "
                    "the one that was trained before."
                )
            self._position += len(rows.ids)


def _checked_skip(skip: Any) -> int:
    if isinstance(skip, bool) or not isinstance(skip, (int, np.integer)) or skip < 0:
        raise ValueError(f"skip must be a number of examples, at least 0, got {skip!r}.")
    return int(skip)


def _some(ids: list[Any], most: int = 5) -> str:
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(map(repr, ids[:most])) + more

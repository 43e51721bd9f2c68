"""RowLayout: which example goes to which microbatch of which replica, and what it weighs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jax_accum import _padding
from jax_accum._group import Group
from jax_accum._plan import BatchPlan
from jax_accum._rows import Rows
from jax_accum._split import microbatch_rows

Tree = Any


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where the rows of a group go: `plan`, the replicas of this process, what says padding."""

    plan: BatchPlan
    own: range
    padding: Mapping[str, Any]
    weight: Callable[[Tree], Any] | None

    def group(self, rows: Rows, position: int) -> Group:
        """A group of the examples in `rows`, in their order."""
        n, plan = len(rows.ids), self.plan
        batch = _padding.with_mask(rows.batch, self.padding, (n,))
        leaf = _padding.supervision(batch, self.padding)
        if self.weight is None:
            weights = _padding.count_supervised(leaf, next(iter(self.padding.values())))
        else:
            weights = _checked_weights(self.weight(batch), rows.ids)
        numbers = _numbers(self.plan, n)
        own = numbers[:, self.own.start : self.own.stop].reshape(plan.microbatches, -1)
        if n == plan.examples_per_update:
            batch = jax.tree.map(self._whole, batch)
        else:
            batch = jax.tree.map(lambda x: x[np.minimum(own, n - 1)], batch)
            batch = _padding.clear(batch, own >= n, self.padding)
        tokens = weights.sum().item()
        return Group(
            batch=batch,
            ids=tuple(rows.ids),
            examples=n,
            tokens=tokens,
            ignored=leaf.size - tokens,
            microbatches=_used(np.append(weights, 0)[np.minimum(numbers, n)]),
            padding=plan.examples_per_update - n,
            position=position,
            replicas=self.own,
            numbers=numbers,
        )

    def _whole(self, x: np.ndarray) -> np.ndarray:
        """The rows of this process of a full group; a view where there is one replica."""
        plan = self.plan
        shape = (plan.replicas, plan.microbatches, plan.microbatch_size, *x.shape[1:])
        own = x.reshape(shape).swapaxes(0, 1)[:, self.own.start : self.own.stop]
        return own.reshape(plan.microbatches, -1, *x.shape[1:])


@functools.lru_cache(maxsize=8)
def _numbers(plan: BatchPlan, examples: int) -> np.ndarray:
    """`[A, D, m]`: which example of the group each row holds; `examples` and above, none."""
    turn = plan.microbatch_size * plan.replicas
    turns = -(-examples // turn)
    numbers = np.full(
        (plan.microbatches, plan.replicas, plan.microbatch_size), plan.examples_per_update
    )
    numbers[:turns] = microbatch_rows(turns * turn, turns, plan.replicas)
    numbers.flags.writeable = False  # shared by all groups of the size
    return numbers


def _used(weights: np.ndarray) -> int:
    """Microbatches of all replicas, each replica's to its last with a weight; `[A, D, m]`."""
    has = weights.sum(axis=2) != 0
    turns = np.arange(1, len(has) + 1)[:, None]
    return int(np.where(has, turns, 0).max(axis=0).sum())


def _checked_weights(given: Any, ids: list[Any]) -> np.ndarray:
    weights = np.asarray(given)
    if weights.shape != (len(ids),):
        raise ValueError(
            f"weight must return one number per example, shape {(len(ids),)}; got {weights.shape}."
        )
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        at = int(np.argmax(bad))
        raise ValueError(f"weight returned {weights[at]} for example {ids[at]!r}: want 0 or more.")
    return weights

"""Group: the examples of one update, cut into microbatches, and what is known of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

Tree = Any


@dataclasses.dataclass(frozen=True)
class Dropped:
    """Examples that a pass over a stream left out.

    Attributes:
      examples: how many.
      ids: which.
    """

    examples: int
    ids: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """The examples of one update. Numbers are those of all replicas and processes.

    Attributes:
      batch: tree of arrays `[A, m * D, ...]`, of several processes each with its share of D.
      ids: an ID per example, in the order of the stream.
      examples: real examples, without padding.
      tokens: what is supervised, in the unit of the weight: the denominator.
      ignored: entries of real examples that are not supervised, padding to a length included.
      microbatches: on all replicas, each counted to its last with a weight; padding is not.
      padding: rows that are copies and weigh nothing.
      position: examples of the stream up to the end of this group.
      replicas: the numbers of those of this process.
      numbers: `[A, D, m]`, int: the example in each row, as an index into `ids`; larger for
        padding.
    """

    batch: Tree
    ids: tuple[Any, ...]
    examples: int
    tokens: int | float
    ignored: int | float
    microbatches: int
    padding: int
    position: int
    replicas: range
    numbers: np.ndarray = dataclasses.field(repr=False)

    @property
    def partial(self) -> bool:
        """Whether the group is a short one."""
        return self.padding > 0

    @property
    def weight(self) -> int | float:
        """The denominator of the group: `tokens` by its other name."""
        return self.tokens

    @property
    def replica_ids(self) -> dict[int, tuple[Any, ...]]:
        """What each replica of this process has, in the order it is processed; for `audit_ids`."""
        return {
            d: tuple(self.ids[i] for i in self.numbers[:, d].ravel() if i < len(self.ids))
            for d in self.replicas
        }

    def microbatch(self, a: int) -> Tree:
        """Microbatch number `a` of every replica, `[m * D, ...]`: for a call per microbatch."""
        return jax.tree.map(lambda x: x[a], self.batch)

    def microbatch_examples(self, a: int) -> int:
        """Real examples in microbatch number `a`, of all replicas and processes, without padding.

        Example:
          >>> import numpy as np, jax_accum as ja
          >>> plan = ja.BatchPlan(microbatch_size=2, microbatches=3)
          >>> (group,) = ja.groups([{"x": np.arange(3)}], plan)
          >>> [group.microbatch_examples(a) for a in range(group.microbatches)]
          [2, 1]
        """
        return int((self.numbers[a] < len(self.ids)).sum())

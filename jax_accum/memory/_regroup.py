"""Grouped batches cut anew: another m and A, every example on the replica that had it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_accum._plan import BatchPlan

Tree = Any


def regroup(batch: Tree, before: BatchPlan, after: BatchPlan) -> Tree:
    """`[A, m * D, ...]` of one plan as that of another with as many examples per replica.

    Of several processes, each hands over its own replicas' rows, `[A, m * D / processes, ...]`.

    Raises:
      ValueError: a leaf is not grouped as `before` says.

    Example:
      >>> from jax_accum import BatchPlan
      >>> before = BatchPlan(microbatch_size=2, microbatches=2, replicas=2)
      >>> rows = np.array([[0, 1, 4, 5], [2, 3, 6, 7]])  # replica 0 has 0 to 3, in order
      >>> regroup(rows, before, before.with_microbatch_size(1)).tolist()
      [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    if before == after:
        return batch

    def one(x: Any) -> Any:
        shape = np.shape(x)
        m, a = before.microbatch_size, before.microbatches
        if len(shape) < 2 or shape[0] != a or shape[1] % m:
            raise ValueError(
                f"batch has a leaf of shape {shape}, but grouped=True wants [A, m * D, ...] with "
                f"A={a}, m={m}. Without grouped, make's steps split the batch themselves."
            )
        d, rest = shape[1] // m, shape[2:]

        def cut(x: Any) -> Any:
            rows = x.reshape(a, d, m, *rest).swapaxes(0, 1)
            rows = rows.reshape(d, after.microbatches, after.microbatch_size, *rest)
            return rows.swapaxes(0, 1).reshape(after.microbatches, -1, *rest)

        if isinstance(x, jax.Array):
            # Compiled, so that an array sharded over data axes stays where it is.
            return jax.jit(cut, out_shardings=x.sharding)(x)
        return cut(np.asarray(x))

    return jax.tree.map(one, batch)

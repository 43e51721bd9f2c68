"""The split of a batch into microbatches, such that every device keeps the rows it has.

A legend of sizes: A microbatches per replica, m examples in one, D replicas.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def microbatch_rows(rows: int, microbatches: int, replicas: int = 1) -> np.ndarray:
    """Which rows of a batch form which microbatch.

    A batch sharded over D replicas lies in D consecutive blocks. Each block is cut
    into A consecutive microbatches, so that no row leaves its device.

    Args:
      rows: rows of the batch, A * m * D.
      microbatches: A, microbatches per replica.
      replicas: D.

    Returns:
      `[A, D, m]`, int64: row numbers; `[a, d]` is the microbatch that replica `d` takes
      in turn `a`.

    Raises:
      ValueError: `rows` is not a multiple of A * D.

    Example:
      >>> microbatch_rows(8, microbatches=2, replicas=2).tolist()
      [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    require_divisible(rows, microbatches, replicas, "rows")
    blocks = np.arange(rows).reshape(replicas, microbatches, -1)
    return np.swapaxes(blocks, 0, 1)


def require_divisible(rows: int, microbatches: int, replicas: int, what: str) -> None:
    """Raises a `ValueError` unless `rows` can be cut into equal microbatches."""
    if rows == 0:
        raise ValueError(f"{what} has no rows: a group needs at least one example.")
    if rows % (microbatches * replicas):
        over = f" on each of {replicas} replicas" if replicas > 1 else ""
        raise ValueError(
            f"{what} has {rows} rows, which {microbatches} equal microbatches{over} do not divide. "
            "Pad it with rows that weigh nothing (mask 0, label -100), or choose a divisor."
        )


def rows_of(batch: Tree, axes: Tree) -> int:
    """The rows of a batch: the leading size that all leaves to be split share.

    Raises:
      ValueError: leaves differ, a leaf is a scalar, or there is nothing to split.
    """
    sizes: dict[int, str] = {}
    flags = jax.tree.leaves(axes)
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    for (path, leaf), is_split in zip(leaves, flags, strict=True):
        if not is_split:
            continue
        name = f"batch{jax.tree_util.keystr(path)}"
        if jnp.ndim(leaf) == 0:
            raise ValueError(
                f"{name} is a scalar and cannot be split into microbatches. Mark it as one that "
                "all microbatches share: batch_axes=None for that leaf."
            )
        sizes.setdefault(jnp.shape(leaf)[0], name)
    if not sizes:
        raise ValueError("batch has no leaf to split into microbatches.")
    if len(sizes) > 1:
        found = ", ".join(f"{n} in {name}" for n, name in sizes.items())
        raise ValueError(f"the leaves of batch differ in their leading size: {found}.")
    return next(iter(sizes))


def split_flags(batch: Tree, batch_axes: Any) -> Tree:
    """For each leaf of `batch` whether it is split; `batch_axes` is a prefix of 0 and None."""

    def spread(axis: Any, part: Tree) -> Tree:
        if axis not in (0, None) or isinstance(axis, bool):
            raise ValueError(f"batch_axes must hold 0 (split) or None (shared) only, got {axis!r}.")
        return jax.tree.map(lambda _: axis == 0, part)

    return jax.tree.map(spread, batch_axes, batch, is_leaf=lambda x: x is None)


def split(leaf: Any, microbatches: int) -> jax.Array:
    """`[A * m, ...]` to `[A, m, ...]`, consecutive rows together."""
    x = jnp.asarray(leaf)
    return x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:])


def require_rows(batch: Tree, flags: Tree, microbatches: int | None, replicas: int) -> None:
    """Raises a `ValueError` unless the batch can be cut, or is cut, for so many replicas."""
    rows = rows_of(batch, flags)
    if microbatches is not None:
        require_divisible(rows, microbatches, replicas, "batch")
        return
    if rows == 0:
        raise ValueError("batch holds no microbatches: its leading size is 0.")
    for x, is_split in zip(jax.tree.leaves(batch), jax.tree.leaves(flags), strict=True):
        if is_split and jnp.ndim(x) < 2:
            raise ValueError(
                f"microbatches=None wants a grouped batch, [A, m, ...], but a leaf has shape "
                f"{jnp.shape(x)}. Pass the number of microbatches to have the batch split."
            )
        if is_split and jnp.shape(x)[1] % replicas:
            raise ValueError(
                f"batch has microbatches of {jnp.shape(x)[1]} rows, which {replicas} replicas do "
                "not divide."
            )


def take(batch: Tree, flags: Tree, index: Any) -> Tree:
    """Microbatch `index` of a grouped batch; shared leaves whole."""

    def one(x: Any, is_split: bool) -> Any:
        if not is_split:
            return x
        return jax.lax.dynamic_index_in_dim(jnp.asarray(x), index, 0, keepdims=False)

    return jax.tree.map(one, batch, flags)

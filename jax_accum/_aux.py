"""What becomes of a loss function's auxiliary output over the microbatches of a group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Tree = Any

HOW = ("stack", "sum", "mean", "last")


def spread(how: Any, aux: Tree, terms: list[str]) -> Tree:
    """One of `HOW` for every leaf of `aux`; `how` is one of them, or a prefix tree of them.

    Raises:
      ValueError: an unknown name, or `"mean"` where several `terms` each have a weight.
    """

    def one(name: Any, part: Tree) -> Tree:
        if name not in HOW:
            raise ValueError(f"aux must hold 'stack', 'sum', 'mean' or 'last', got {name!r}.")
        if name == "mean" and len(terms) > 1:
            raise ValueError(
                f"aux='mean' does not know by which of the weights {terms}: use 'sum' and divide, "
                "or return the metric as a term with coefficient 0."
            )
        return jax.tree.map(lambda _: name, part)

    return jax.tree.map(one, how, aux)


def start(how: Tree, aux: Tree, microbatches: int) -> Tree:
    """Room for what `finish` returns; `aux` gives shapes and dtypes."""

    def room(name: str, x: Any) -> jax.Array:
        if name == "stack":
            return jnp.zeros((microbatches, *x.shape), x.dtype)
        return jnp.zeros(x.shape, _sum_dtype(x.dtype) if name in ("sum", "mean") else x.dtype)

    return jax.tree.map(room, how, aux)


def add(how: Tree, so_far: Tree, aux: Tree, index: Any, weight: jax.Array) -> Tree:
    """Takes in microbatch `index`, whose weight is `weight`."""

    def one(name: str, old: jax.Array, new: Any) -> jax.Array:
        new = jnp.asarray(new)
        if name == "stack":
            return jax.lax.dynamic_update_index_in_dim(old, new, index, 0)
        if name == "last":
            return new
        if name == "sum":
            return old + new.astype(old.dtype)
        return old + jnp.where(weight > 0, new.astype(old.dtype) * weight.astype(old.dtype), 0)

    return jax.tree.map(one, how, so_far, aux)


def finish(how: Tree, so_far: Tree, weight: jax.Array, axes: tuple[Any, ...]) -> Tree:
    """Reduces sums and means over the bound `axes`; divides means by the weight of the group."""

    def one(name: str, x: jax.Array) -> jax.Array:
        if name in ("sum", "mean") and axes:
            x = jax.lax.psum(x, axes)
        return x * jnp.where(weight > 0, 1 / weight, 0).astype(x.dtype) if name == "mean" else x

    return jax.tree.map(one, how, so_far)


def parted(how: Tree, aux: Tree) -> dict[str, list[jax.Array]]:
    """The leaves by what they are over replicas, for `specs`: the same, stacked, or last.

    What differs between replicas gets an axis over them: `[A, 1, ...]`, `[1, ...]`.
    """
    parts: dict[str, list[jax.Array]] = {"same": [], "stack": [], "last": []}
    for name, x in zip(jax.tree.leaves(how), jax.tree.leaves(aux), strict=True):
        if name == "stack":
            parts["stack"].append(x[:, None])
        elif name == "last":
            parts["last"].append(x[None])
        else:
            parts["same"].append(x)
    return parts


def specs(axes: tuple[Any, ...]) -> dict[str, PartitionSpec]:
    """A `PartitionSpec` for each part that `parted` makes."""
    return {
        "same": PartitionSpec(),
        "stack": PartitionSpec(None, axes),
        "last": PartitionSpec(axes),
    }


def joined(how: Tree, parts: dict[str, list[jax.Array]]) -> Tree:
    """The inverse of `parted`, but for the axis over replicas."""
    rest = {name: iter(leaves) for name, leaves in parts.items()}
    return jax.tree.map(lambda name: next(rest.get(name, rest["same"])), how)


def _sum_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.result_type(float) if dtype == jnp.bool_ else dtype

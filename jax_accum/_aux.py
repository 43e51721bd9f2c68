"""What becomes of a loss function's auxiliary output over the microbatches of a group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

HOW = ("stack", "sum", "mean", "last")


def spread(how: Any, aux: Tree) -> Tree:
    """One of `HOW` for every leaf of `aux`; `how` is one of them, or a prefix tree of them."""

    def one(name: Any, part: Tree) -> Tree:
        if name not in HOW:
            raise ValueError(f"aux must hold 'stack', 'sum', 'mean' or 'last', got {name!r}.")
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


def finish(how: Tree, so_far: Tree, weight: jax.Array) -> Tree:
    """Divides what is a mean by the weight of the whole group."""

    def one(name: str, x: jax.Array) -> jax.Array:
        return x * jnp.where(weight > 0, 1 / weight, 0).astype(x.dtype) if name == "mean" else x

    return jax.tree.map(one, how, so_far)


def _sum_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.result_type(float) if dtype == jnp.bool_ else dtype

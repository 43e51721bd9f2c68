"""Replicas: axis names, what varies over them, and the one reduction of a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

AxisName = Any
"""A name of a mapped axis, or a tuple of names."""


def axis_names(axis_name: AxisName) -> tuple[Any, ...]:
    """`axis_name` as a tuple; `None` gives an empty one."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def is_bound(names: Iterable[Any]) -> bool:
    """Whether the code is being traced inside a `shard_map`, `pmap` or `vmap` over `names`."""
    try:
        for name in names:
            jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def require_bound(names: Iterable[Any]) -> None:
    """Raises a `ValueError` if one of the axis names is not in scope."""
    for name in names:
        if not is_bound([name]):
            raise ValueError(
                f"axis_name={name!r} is not bound here. Call this inside jax.shard_map or jax.pmap "
                f"over an axis of that name, or leave axis_name out if the gradients are global."
            )


def varying_axes(x: Any) -> frozenset[Any]:
    """The mapped axes over which `x` is known to differ; empty where JAX does not track them."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", None) or ())


def is_tracked(names: tuple[Any, ...]) -> bool:
    """Whether JAX tracks what varies over `names` (`shard_map` with `check_vma=True`)."""
    return bool(names) and bool(varying_axes(jax.lax.axis_index(names[0])))


def as_varying(tree: Any, names: tuple[Any, ...]) -> Any:
    """`tree`, every leaf typed as differing over the bound axes `names`; no data moves."""
    if not names or not is_tracked(names):
        return tree

    def cast(x: Any) -> Any:
        missing = tuple(name for name in names if name not in varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def require_varying(tree: Any, names: tuple[Any, ...], what: str) -> None:
    """Raises a `ValueError` if a leaf was already reduced over one of `names`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if missing := [name for name in names if name not in varying_axes(leaf)]:
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} is the same on all replicas of {missing}: it "
                "was reduced already, once in every call. Differentiate with respect to "
                "jax.lax.pcast(params, axis_name, to='varying') to get each replica's own "
                "gradient, or leave axis_name out."
            )


def require_different(batch: Any, flags: Any, names: tuple[Any, ...]) -> None:
    """Raises a `ValueError` if all replicas have been given the same batch."""
    if not names or not is_tracked(names):
        return
    pairs = zip(jax.tree.leaves(batch), jax.tree.leaves(flags), strict=True)
    seen = frozenset().union(*(varying_axes(x) for x, is_split in pairs if is_split))
    if missing := [name for name in names if name not in seen]:
        raise ValueError(
            f"batch is the same on all replicas of {missing}: each example would count once per "
            "replica. Shard it: in_specs=PartitionSpec(axis_name) for the batch in your shard_map."
        )


def reduced_state(state: Any, how: str, names: tuple[Any, ...]) -> Any:
    """One state from that of every replica: the `"mean"`, or that of the `"first"`."""
    if not names:
        return state

    def mean(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, names)
        return jax.lax.pmax(x, names)

    def first(x: Any) -> Any:
        return jax.lax.psum(jnp.where(jax.lax.axis_index(names) == 0, x, jnp.zeros_like(x)), names)

    return jax.tree.map(mean if how == "mean" else first, state)

"""Where the shards of parameters and accumulators lie over the data axes of a mesh."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

Tree = Any
WHOLE = -1
"""Stands for a leaf that is not sharded over the data axes."""


class Layout(NamedTuple):
    """Dimensions along which leaves are sharded over the data axes; trees like the parameters.

    Attributes:
      axes: names of the data axes; empty on one device.
      replicas: D.
      params: of the parameters that a replica is given, an int per leaf or `WHOLE`.
      grads: of the accumulators, and of the gradient that is returned.
      each: reduce and scatter the gradient of every microbatch, not of the group.
      gather_each: gather sharded parameters for every microbatch, not for the group.
    """

    axes: tuple[Any, ...]
    replicas: int
    params: Tree
    grads: Tree
    each: bool
    gather_each: bool

    def gather(self, params: Tree, dims: Tree | None = None) -> Tree:
        """Whole leaves from shards; of parameters, unless `dims` says otherwise."""

        def whole(x: jax.Array, dim: int) -> jax.Array:
            return x if dim == WHOLE else jax.lax.all_gather(x, self.axes, axis=dim, tiled=True)

        return jax.tree.map(whole, params, self.params if dims is None else dims)

    def scatter(self, grads: Tree) -> Tree:
        """Sums over the replicas, of each leaf that is sharded only the shard."""

        def shard(x: jax.Array, dim: int) -> jax.Array:
            if dim == WHOLE:
                return x
            return jax.lax.psum_scatter(x, self.axes, scatter_dimension=dim, tiled=True)

        return jax.tree.map(shard, grads, self.grads)

    def shards(self, zeros: Tree) -> Tree:
        """From accumulators as large as the leaves they are for, those that are kept."""
        if not self.each:
            return zeros

        def shard(x: jax.Array, dim: int) -> jax.Array:
            if dim == WHOLE:
                return x
            return jax.lax.slice_in_dim(x, 0, x.shape[dim] // self.replicas, axis=dim)

        return jax.tree.map(shard, zeros, self.grads)

    def reduce(self, grads: Tree) -> Tree:
        """What is left to reduce after the last microbatch."""
        if not self.axes:
            return grads
        if not self.each:
            grads = self.scatter(grads)
        leaves, treedef = jax.tree.flatten(grads)
        dims = jax.tree.leaves(self.grads)
        local = [x for x, dim in zip(leaves, dims, strict=True) if dim == WHOLE]
        local = iter(jax.lax.psum(local, self.axes)) if local else iter(())
        return jax.tree.unflatten(
            treedef,
            [next(local) if dim == WHOLE else x for x, dim in zip(leaves, dims, strict=True)],
        )

    def specs(self, dims: Tree) -> Tree:
        """A `PartitionSpec` per leaf."""
        return jax.tree.map(lambda d: spec_at(d, self.axes), dims)


def spec_at(dim: int, axes: tuple[Any, ...]) -> PartitionSpec:
    """Sharded over `axes` along one dimension; `WHOLE` for none."""
    return PartitionSpec() if dim == WHOLE else PartitionSpec(*[None] * dim, axes)


def layout(
    params: Tree,
    axes: tuple[Any, ...],
    replicas: int,
    reduce: str,
    param_specs: Tree | None = None,
    gather: str = "group",
) -> Layout:
    """How parameters and accumulators are sharded.

    Args:
      params: whole parameters, for their shapes.
      axes: names of the data axes.
      replicas: D.
      reduce: `"once"` or `"each"`.
      param_specs: a `PartitionSpec` per leaf, or a prefix tree, of which the data axes
        count; parameters are whole on every replica if not given.
      gather: `"group"` or `"microbatch"`.

    Raises:
      ValueError: a choice unknown, or a leaf that the replicas do not divide.
    """
    if reduce not in ("once", "each"):
        raise ValueError(f"reduce must be 'once' or 'each', got {reduce!r}.")
    if gather not in ("group", "microbatch"):
        raise ValueError(f"gather must be 'group' or 'microbatch', got {gather!r}.")
    given = jax.tree.map(lambda _: WHOLE, params)
    if param_specs is not None:
        given = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda x: _dim_of(spec, x, axes, replicas), part),
            param_specs,
            params,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def accumulator_dim(x: Any, dim: int) -> int:
        if dim != WHOLE or reduce == "once" or not axes:
            return dim
        fits = [i for i, n in enumerate(jnp.shape(x)) if n and n % replicas == 0]
        return max(fits, key=lambda i: jnp.shape(x)[i], default=WHOLE)

    return Layout(
        axes=axes,
        replicas=replicas,
        params=given,
        grads=jax.tree.map(accumulator_dim, params, given),
        each=reduce == "each" and bool(axes),
        gather_each=gather == "microbatch",
    )


def _dim_of(spec: PartitionSpec, leaf: Any, axes: tuple[Any, ...], replicas: int) -> int:
    """The dimension of a leaf that its spec shards over the data axes."""
    for dim, entry in enumerate(spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        if not set(names) & set(axes):
            continue
        if tuple(n for n in names if n in axes) != axes:
            raise ValueError(
                f"param_specs has {spec}: a parameter must be sharded over all data axes {axes} "
                "in that order, or over none."
            )
        if jnp.shape(leaf)[dim] % replicas:
            raise ValueError(
                f"param_specs has {spec} for a parameter of shape {jnp.shape(leaf)}, of which "
                f"{replicas} replicas do not divide dimension {dim}."
            )
        return dim
    return WHOLE


def data_replicas(mesh: Mesh, data_axes: str | tuple[str, ...] = ("data",)) -> int:
    """Data replicas of a mesh: the product of its data axes.

    Devices along other axes (tensor, pipeline) share one copy of the model, and are
    one replica together.

    Args:
      mesh: a concrete or abstract mesh.
      data_axes: names of the axes over which examples are sharded.

    Returns:
      D.

    Raises:
      ValueError: the mesh lacks one of the axes.

    Example:
      >>> import jax, jax_accum as ja
      >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
      >>> ja.data_replicas(mesh)
      4
    """
    names = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    if missing := [name for name in names if name not in mesh.axis_names]:
        raise ValueError(
            f"data_axes names {missing}, but the mesh has the axes {list(mesh.axis_names)}. "
            "Pass those over which the batch is sharded."
        )
    return math.prod(mesh.shape[name] for name in names)

"""Where the shards of parameters and accumulators lie over the data axes of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

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
      others: a `PartitionSpec` per leaf, of the axes that are not data axes.
    """

    axes: tuple[Any, ...]
    replicas: int
    params: Tree
    grads: Tree
    each: bool
    gather_each: bool
    others: Tree

    def gather(self, params: Tree) -> Tree:
        """Whole parameters from shards."""
        return self._gathered(params, self.params, "varying")

    def gather_in(self, index: Any, params: Tree) -> Tree:
        """The same inside a loop, for its iteration `index` only.

        Without the barrier, gathering is the same in every iteration, and XLA moves it out of
        the loop: the whole parameters would be there for the length of the group.
        """
        if all(dim == WHOLE for dim in jax.tree.leaves(self.params)):
            return params
        return self.gather(jax.lax.optimization_barrier((params, index))[0])

    def gather_grads(self, grads: Tree) -> Tree:
        """Whole gradients, the same on every replica, from shards of them."""
        return self._gathered(grads, self.grads, "invarying")

    def _gathered(self, tree: Tree, dims: Tree, to: str) -> Tree:
        def whole(x: jax.Array, dim: int, other: PartitionSpec) -> jax.Array:
            if dim == WHOLE:
                return x
            return _beside(other, dim)(
                lambda x: jax.lax.all_gather(x, self.axes, axis=dim, tiled=True, to=to)
            )(x)

        return jax.tree.map(whole, tree, dims, self.others)

    def scatter(self, grads: Tree) -> Tree:
        """Sums over the replicas, of each leaf that is sharded only the shard."""

        def shard(x: jax.Array, dim: int, other: PartitionSpec) -> jax.Array:
            if dim == WHOLE:
                return x
            return _beside(other, dim)(
                lambda x: jax.lax.psum_scatter(x, self.axes, scatter_dimension=dim, tiled=True)
            )(x)

        return jax.tree.map(shard, grads, self.grads, self.others)

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


def _beside(other: PartitionSpec, dim: int) -> Callable[[Any], Any]:
    """Makes a collective along `dim` act on each shard over the other axes of a mesh.

    Left automatic, XLA gathers over those axes first: it splits an all-reduce along
    automatic axes, but neither a gather nor a scatter (JAX 0.10 and 0.12).
    """
    names = {n for e in other if e for n in (e if isinstance(e, tuple) else (e,))}
    # Blocks over both kinds of axes lie in another order when those of one are put together.
    if not names or (dim < len(other) and other[dim]):
        return lambda f: f
    return lambda f: jax.shard_map(
        f, in_specs=other, out_specs=other, axis_names=names, check_vma=False
    )


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
    mesh_axes: tuple[Any, ...] = (),
) -> Layout:
    """How parameters and accumulators are sharded.

    Args:
      params: whole parameters, for their shapes.
      axes: names of the data axes.
      replicas: D.
      reduce: `"once"` or `"each"`.
      param_specs: a `PartitionSpec` per leaf, or a prefix tree. Its data axes say of which
        dimension a replica is given a shard; parameters are whole on every replica if not
        given. Its other axes say which dimensions to leave alone.
      gather: `"group"` or `"microbatch"`.
      mesh_axes: names of all axes of the mesh.

    Raises:
      ValueError: a choice or an axis unknown, or a leaf that the replicas do not divide.
    """
    if reduce not in ("once", "each"):
        raise ValueError(f"reduce must be 'once' or 'each', got {reduce!r}.")
    if gather not in ("group", "microbatch"):
        raise ValueError(f"gather must be 'group' or 'microbatch', got {gather!r}.")
    specs = jax.tree.map(lambda _: PartitionSpec(), params)
    if param_specs is not None:
        specs = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda x: _checked(spec, x, mesh_axes), part),
            param_specs,
            params,
            is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
        )
    given = jax.tree.map(lambda x, spec: _dim_of(spec, x, axes, replicas), params, specs)
    if mesh_axes:
        specs = jax.tree.map(lambda spec, x: spec if len(spec) else _known_spec(x), specs, params)

    def accumulator_dim(x: Any, spec: PartitionSpec, dim: int) -> int:
        if dim != WHOLE or reduce == "once" or not axes:
            return dim
        # A dimension that another axis shards already would have to be gathered over that
        # axis in every microbatch, to be cut along this one.
        busy = {i for i, entry in enumerate(spec) if entry is not None}
        shape = jnp.shape(x)
        fits = [i for i, n in enumerate(shape) if n and n % replicas == 0 and i not in busy]
        return max(fits, key=lambda i: shape[i], default=WHOLE)

    return Layout(
        axes=axes,
        replicas=replicas,
        params=given,
        grads=jax.tree.map(accumulator_dim, params, specs, given),
        each=reduce == "each" and bool(axes),
        gather_each=gather == "microbatch",
        others=jax.tree.map(lambda spec: _without(spec, axes), specs),
    )


def _without(spec: PartitionSpec, axes: tuple[Any, ...]) -> PartitionSpec:
    """A spec without the data axes."""

    def rest(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        names = tuple(n for n in names if isinstance(n, str) and n not in axes)
        return names or None

    return PartitionSpec(*map(rest, spec))


def _known_spec(x: Any) -> PartitionSpec:
    """The sharding that an array, or a traced one on an explicit mesh, tells about itself."""
    sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) else None
    if isinstance(x, jax.core.Tracer):
        sharding = getattr(jax.typeof(x), "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _checked(spec: PartitionSpec | None, leaf: Any, mesh_axes: tuple[Any, ...]) -> PartitionSpec:
    """A spec that fits the leaf and the mesh."""
    spec = PartitionSpec() if spec is None else spec
    named = [n for e in spec for n in (e if isinstance(e, tuple) else (e,)) if isinstance(n, str)]
    if missing := sorted(set(named) - set(mesh_axes)):
        raise ValueError(
            f"param_specs has {spec}, but the mesh has the axes {list(mesh_axes)}: no {missing}."
        )
    if len(spec) > jnp.ndim(leaf):
        raise ValueError(f"param_specs has {spec} for a parameter of shape {jnp.shape(leaf)}.")
    return spec


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


def data_replicas(mesh: Mesh | AbstractMesh, data_axes: str | tuple[str, ...] = ("data",)) -> int:
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

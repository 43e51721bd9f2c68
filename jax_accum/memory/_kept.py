"""A copy on the host of what a step may use up, and its return to the devices where it was lost."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

Tree = Any


class _Copy(NamedTuple):
    """One array: its parts on the devices of this process, and how they make the whole."""

    shape: tuple[int, ...]
    sharding: Any
    committed: bool
    shards: list[tuple[Any, np.ndarray]]
    key_impl: Any


class Kept:
    """Copies of the arrays of a tree, one per local shard, in host memory.

    Example:
      >>> import jax.numpy as jnp
      >>> tree = {"w": jnp.arange(3.0)}
      >>> kept = Kept(tree)
      >>> tree["w"].delete()
      >>> kept.restored(tree)["w"].tolist()
      [0.0, 1.0, 2.0]
    """

    def __init__(self, tree: Tree) -> None:
        self._copies = [
            _copied(x) if isinstance(x, jax.Array) else None for x in jax.tree.leaves(tree)
        ]

    def restored(self, tree: Tree) -> Tree:
        """`tree` with deleted arrays made anew, where they lay; the others are the same objects."""
        leaves, treedef = jax.tree.flatten(tree)
        anew = [
            _restored(copy) if copy is not None and is_lost(x) else x
            for x, copy in zip(leaves, self._copies, strict=True)
        ]
        return jax.tree.unflatten(treedef, anew)


def is_lost(x: Any) -> bool:
    """Whether a leaf is an array whose buffer was given away."""
    return isinstance(x, jax.Array) and x.is_deleted()


def _copied(x: jax.Array) -> _Copy:
    impl = None
    committed = bool(getattr(x, "committed", True))
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        impl, x = jax.random.key_impl(x), jax.random.key_data(x)
    # Of the shard's own object, and copied: a view kept on the array would forbid its donation.
    shards = [(shard.device, np.array(shard.data)) for shard in x.addressable_shards]
    return _Copy(x.shape, x.sharding, committed, shards, impl)


def _restored(copy: _Copy) -> jax.Array:
    if len(copy.shards) == 1 and not copy.committed:
        x = jax.numpy.array(copy.shards[0][1])
    else:
        # Copied once more: on a CPU the device may take the memory of the host's array as its own,
        # and a second failure would find the copy overwritten.
        parts = [jax.device_put(data.copy(), device) for device, data in copy.shards]
        x = jax.make_array_from_single_device_arrays(copy.shape, copy.sharding, parts)
    return x if copy.key_impl is None else jax.random.wrap_key_data(x, impl=copy.key_impl)

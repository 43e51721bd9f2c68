"""Trees of arrays to and from Orbax: random keys as their data, nothing of size 0."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

Tree = Any


def orbax() -> Any:
    """Orbax's module.

    Raises:
      ImportError: it is not installed.
    """
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ImportError("checkpoints need Orbax: pip install 'jax-accum[checkpoint]'") from error


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_arrays(tree: Tree) -> dict[str, Any]:
    """The leaves by number, as Orbax takes them: keys as their data, nothing of size 0."""
    leaves = [jax.random.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(tree)]
    return {f"{i:06d}": x for i, x in enumerate(leaves) if np.size(x)}


def write(path: Path, tree: Tree) -> None:
    """Writes the leaves of `tree`; all processes together."""
    with orbax().StandardCheckpointer() as checkpointer:
        checkpointer.save(path, _as_arrays(tree))


def read(path: Path, like: Tree) -> Tree:
    """Reads what `write` wrote, as a tree like `like` in structure, dtypes and shardings.

    Raises:
      ValueError: leaves of other shapes or dtypes were written.
    """
    leaves, structure = jax.tree.flatten(like)
    wanted = _as_arrays(like)
    ocp = orbax()
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
    with ocp.StandardCheckpointer() as checkpointer:
        meta = checkpointer.metadata(path).item_metadata
        saved = {name: (tuple(x.shape), str(np.dtype(x.dtype))) for name, x in meta.items()}
        ours = {name: (tuple(x.shape), str(np.dtype(x.dtype))) for name, x in abstract.items()}
        if saved != ours:
            paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(like)]
            wrong = sorted(n for n in saved.keys() | ours.keys() if saved.get(n) != ours.get(n))
            at = int(wrong[0])
            name = paths[at] if at < len(paths) else f"number {at}"
            raise ValueError(
                f"{path.parent} holds another state than `like`: leaf {name} is "
                f"{saved.get(wrong[0], 'missing')} there and {ours.get(wrong[0], 'missing')} here."
            )
        found = checkpointer.restore(path, abstract)

    def back(i: int, x: Any) -> Any:
        if f"{i:06d}" not in found:
            return x
        value = found[f"{i:06d}"]
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(x)) if _is_key(x) else value

    return jax.tree.unflatten(structure, [back(i, x) for i, x in enumerate(leaves)])

"""A jitted step that keeps shardings, and says what became of donated arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_accum._accumulator import require_arrays

Tree = Any

SMALL = 1024
"""Entries up to which a leaf is copied to all devices without a thought (counters, scales)."""


class CompiledStep:
    """`jax.jit` of `step(params, opt_state, batch, ...)`, which returns the first two anew.

    Called, `lower`ed and `eval_shape`d like what `jax.jit` returns. On a mesh, the new
    parameters and optimizer state are given the shardings of those that came in, so that they
    can take their buffers, and so that the next call finds what it was compiled for.
    """

    def __init__(self, step: Callable[..., Any], *, donate: bool, mesh: Any, splits: bool):
        self._step = step
        self._donate = (0, 1) if donate else ()
        self._mesh = mesh if isinstance(mesh, Mesh) else None
        self._checks_batch = mesh is None and splits
        self._plain = jax.jit(step, donate_argnums=self._donate)
        self._pinned: dict[Any, Any] = {}
        self._last: tuple[Any, list[Any], Any] | None = None
        self.__doc__ = step.__doc__

    def __call__(self, params: Tree, opt_state: Any, batch: Tree, *args: Any, **kwargs: Any) -> Any:
        """Makes one update."""
        if self._checks_batch:
            _require_whole(batch)
        _require_alive("params", params)
        _require_alive("opt_state", opt_state)
        jitted, params, opt_state = self._jitted(params, opt_state)
        try:
            return jitted(params, opt_state, batch, *args, **kwargs)
        except (TypeError, ValueError, RuntimeError):
            require_arrays(params, "params")
            if self._donate:
                _require_once(params, opt_state)
            raise

    def lower(self, params: Tree, opt_state: Any, batch: Tree, *args: Any, **kwargs: Any) -> Any:
        """As `lower` of what `jax.jit` returns; arrays or `jax.ShapeDtypeStruct`s."""
        jitted, params, opt_state = self._jitted(params, opt_state)
        return jitted.lower(params, opt_state, batch, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `trace` of what `jax.jit` returns."""
        return self._plain.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `eval_shape` of what `jax.jit` returns."""
        return self._plain.eval_shape(*args, **kwargs)

    def _cache_size(self) -> int:
        return sum(f._cache_size() for f in (self._plain, *self._pinned.values()))

    def _jitted(self, params: Tree, opt_state: Any) -> tuple[Any, Tree, Any]:
        """The function for arguments sharded like these, and these, on the mesh."""
        leaves, treedef = jax.tree.flatten((params, opt_state))
        if self._mesh is None or any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self._plain, params, opt_state
        shardings = self._shardings(leaves)
        if self._last is not None and self._last[:2] == (treedef, shardings):
            return self._last[2], params, opt_state
        if not all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            params, opt_state = self._placed(params, opt_state)
            shardings = self._shardings(jax.tree.leaves((params, opt_state)))
        key = (treedef, tuple(shardings))
        if key not in self._pinned:
            out = (*jax.tree.unflatten(treedef, shardings), None)
            self._pinned[key] = jax.jit(self._step, donate_argnums=self._donate, out_shardings=out)
        self._last = (treedef, shardings, self._pinned[key])
        return self._pinned[key], params, opt_state

    def _on_mesh(self, x: Any) -> NamedSharding | None:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or self._mesh is None:
            return None
        return sharding if sharding.mesh.shape == self._mesh.shape else None

    def _shardings(self, leaves: list[Any]) -> list[NamedSharding | None]:
        return [self._on_mesh(x) for x in leaves]

    def _placed(self, params: Tree, opt_state: Any) -> tuple[Tree, Any]:
        """What no sharding was given yet, as it would lie after the first update."""
        assert self._mesh is not None
        same = NamedSharding(self._mesh, PartitionSpec())

        def place(x: Any, everything: bool) -> Any:
            committed = self._on_mesh(x) is not None or getattr(x, "committed", False)
            if committed or not (everything or jax.numpy.size(x) <= SMALL):
                return x
            return jax.device_put(x, same)

        params = jax.tree.map(lambda x: place(x, True), params)
        whole = all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
        return params, jax.tree.map(lambda x: place(x, whole), opt_state)


def _require_alive(name: str, tree: Tree) -> None:
    """Raises a `ValueError` for an array whose buffer an earlier call was given."""

    def is_gone(x: Any) -> bool:
        return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()

    if not any(map(is_gone, jax.tree.leaves(tree))):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if is_gone(x):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} was deleted: an earlier call of this step was "
                "given its buffer (donated) for its results. Go on with what that call returned, "
                "`params, opt_state, metrics = step(params, opt_state, batch)`; copy what you want "
                "to keep first (jax.tree.map(jnp.copy, params)), or build the step with "
                "make_train_step(..., donate=False), which needs that memory twice."
            )


def _require_once(params: Tree, opt_state: Any) -> None:
    """Raises a `ValueError` for an array that stands twice where buffers are donated."""
    seen: dict[int, str] = {}
    for name, tree in (("params", params), ("opt_state", opt_state)):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            where = f"{name}{jax.tree_util.keystr(path)}"
            if isinstance(x, jax.Array) and (first := seen.setdefault(id(x), where)) != where:
                raise ValueError(
                    f"{first} and {where} are one array, whose buffer cannot be donated twice. "
                    "Weights that are tied stand once in a tree of parameters, or are two after "
                    "the first update: tie them inside loss_fn (Equinox: eqx.nn.Shared). If they "
                    "are to be two, copy one (jnp.copy)."
                )


def _require_whole(batch: Tree) -> None:
    """Raises a `ValueError` for rows that lie on several devices, when no mesh is known."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not sharding.spec or not sharding.spec[0]:
            continue
        names = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
        if any(sharding.mesh.shape[name] > 1 for name in names):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has rows sharded over {list(names)}, but the "
                "step was built without a mesh: every device would gather and compute all of "
                f"them. Pass mesh= and data_axes={names!r} to make_train_step."
            )

"""accumulated_value_and_grad: the loss and gradient of a whole group in one compiled call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jax_accum import _accumulator as accumulator
from jax_accum import _replicas, _split
from jax_accum._checks import checked_int
from jax_accum._group_run import GroupInfo, Local, Operands, over_mesh
from jax_accum._layout import data_replicas, layout

__all__ = ["GroupInfo", "accumulated_value_and_grad"]

Tree = Any


def accumulated_value_and_grad(
    loss_fn: Callable[..., Any],
    microbatches: int | None,
    *,
    has_aux: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    data_axes: str | tuple[str, ...] = ("data",),
    axis_name: Any = None,
    reduce: str = "once",
    accumulator_dtype: Any = None,
    coefficients: Mapping[str, float] | None = None,
    aux: Any = "stack",
    batch_axes: Any = 0,
    grad_norm: bool = False,
    has_state: bool = False,
    state_reduce: str = "mean",
    param_specs: Tree | None = None,
    gather: str = "group",
    references: bool = False,
) -> Callable[..., tuple[tuple[jax.Array, GroupInfo], Tree]]:
    r"""Like `jax.value_and_grad`, over the microbatches of a group.

    With a sum :math:`S_{t,a}` and a weight :math:`W_{t,a}` for each term :math:`t` and
    microbatch :math:`a`, and coefficients :math:`c_t`, what is returned is

    .. math::
      \mathrm{loss} = \sum_t c_t \frac{\sum_a S_{t,a}}{\sum_a W_{t,a}}, \qquad
      \mathrm{grad} = \sum_t c_t \frac{\sum_a \nabla S_{t,a}}{\sum_a W_{t,a}} ,

    the very numbers that the undivided batch gives. The denominators are found before
    the first backward pass, by running `loss_fn` with all but its weights cut away; one
    accumulator then serves all terms. Where a weight is 0 the term contributes nothing,
    whatever its gradient holds. Microbatches behind the last one with a weight are
    padding: they are not computed, and a shorter group does not recompile.

    Args:
      loss_fn: `loss_fn(params, microbatch, *args)` returns a `Weighted`, or a dict of
        them by term name. With `has_aux` it returns `(terms, aux)`, a tree of arrays;
        with `has_state` `(terms, state)`; with both `(terms, aux, state)`. Weights must
        not depend on `params`. It is called with `key=` and `state=` where these are given.
      microbatches: A, into which the rows of a batch are split; `microbatch_rows` says
        which rows go together. `None` takes a batch that is grouped already, `[A, m * D, ...]`.
      has_aux: whether `loss_fn` returns auxiliary output.
      mesh: splits a global batch over the data axes of this mesh, each device keeping the
        rows it has, and reduces once. Call the function under `jax.jit`. Other axes of
        the mesh stay automatic.
      data_axes: name, or tuple of names, of the axes of `mesh` over which the batch is
        sharded. Their product is D.
      axis_name: name, or tuple of names, of mapped axes over which the caller runs
        this (`jax.shard_map`, `jax.pmap`), each replica with microbatches of its own.
        Sums stay local and are reduced once, after the last microbatch. Not with `mesh`.
      reduce: `"once"` reduces the gradient after the last microbatch: the least
        communication. `"each"` scatters it in every microbatch into accumulators
        sharded over the data axes, 1/D of their memory for A times the reductions.
      accumulator_dtype: widens the accumulators, and is then the dtype of the gradient.
        They are never narrower than float32 nor than the parameters.
      coefficients: :math:`c_t` by term name; 1 where not given.
      aux: `"stack"` (`[A, ...]`; zeros for microbatches not computed), `"sum"`, `"mean"`
        (by the weight of the microbatch; a loss of one term only) or `"last"` (of those
        computed), or a prefix tree of these. Sums and means are over all replicas; with
        `mesh`, what is stacked is `[A, D, ...]`, and what is last `[D, ...]`.
      batch_axes: 0, or a prefix tree of 0 and `None`; leaves under `None` are handed to
        every microbatch whole.
      grad_norm: compute the global norm of the gradient too.
      has_state: `loss_fn` takes and returns mutable state (running statistics), which the
        microbatches of a replica hand on in order. That is not what the undivided batch
        would have done to it.
      state_reduce: over replicas, at the end: `"mean"` (of floating leaves; the largest
        of others) or `"first"` (that of replica 0).
      param_specs: with `mesh`, a `PartitionSpec` per parameter, or a prefix tree, for
        parameters sharded over the data axes. Gradients are returned sharded alike.
      gather: gather such parameters once per `"group"`, or in every `"microbatch"`.
      references: add to the accumulators inside the backward pass, with no gradient of a
        microbatch beside them: most of a tree less memory where the model scans over its
        layers, nothing where they are unrolled. Only microbatches with a weight are then
        run; a replica with fewer of them runs its first one again, for nothing. The
        parameters must be as wide as their accumulators, and `reduce="once"`.

    Returns:
      `fn(params, batch, *args, key=None, state=None, loss_scale=None)`, which returns
      `((loss, info), grads)`: a scalar, a `GroupInfo`, and a tree like `params` in the
      dtypes of the parameters. `key` is folded with the index of the microbatch and
      of the replica, so that no randomness is used twice. `loss_scale` multiplies the
      gradient, not the loss. A group without any weight has loss 0 and gradient 0.

    Raises:
      TypeError: `loss_fn` returns a bare scalar; a parameter is not floating or complex.
      ValueError: rows that A does not divide, leaves of differing leading size, an
        empty batch, a weight that depends on the parameters, an unknown term, an axis that
        the mesh lacks or that is not bound, a batch that is the same on all replicas.

    Example:
      >>> import jax, jax.numpy as jnp, jax_accum as ja
      >>> def loss_fn(params, batch):
      ...     error = jnp.where(batch["mask"], params * batch["x"] - batch["y"], 0)
      ...     return ja.Weighted(jnp.sum(error**2), jnp.sum(batch["mask"]))
      >>> batch = {"x": jnp.arange(4.0), "y": jnp.ones(4), "mask": jnp.array([1, 1, 1, 0], bool)}
      >>> fn = jax.jit(ja.accumulated_value_and_grad(loss_fn, 2))
      >>> (loss, info), grad = fn(jnp.float32(2.0), batch)
      >>> round(float(loss), 4), float(info.weights["loss"])
      (3.6667, 3.0)
    """
    if microbatches is not None:
        microbatches = checked_int(microbatches, "microbatches")
    if mesh is not None and axis_name is not None:
        raise ValueError(
            "give mesh (to let this split the batch over its data axes) or axis_name (inside your "
            "own shard_map or pmap), not both."
        )
    if mesh is None and param_specs is not None:
        raise ValueError("param_specs needs a mesh.")
    if state_reduce not in ("mean", "first"):
        raise ValueError(f"state_reduce must be 'mean' or 'first', got {state_reduce!r}.")
    if references and reduce != "once":
        raise ValueError("references=True accumulates locally: it goes with reduce='once' only.")
    floor = accumulator.floor_dtype(accumulator_dtype)
    names = _replicas.axis_names(data_axes if mesh is not None else axis_name)
    replicas = 1 if mesh is None else data_replicas(mesh, names)
    local = Local(
        loss_fn,
        has_aux=has_aux,
        has_state=has_state,
        coefficients=coefficients,
        aux=aux,
        floor=floor,
        narrow=accumulator_dtype is None,
        state_reduce=state_reduce,
        references=references,
    )

    def fn(
        params: Tree,
        batch: Tree,
        *args: Any,
        key: Any = None,
        state: Any = None,
        loss_scale: Any = None,
    ) -> tuple[tuple[jax.Array, GroupInfo], Tree]:
        accumulator.require_gradients(params, params, "params", what="params")
        if references:
            accumulator.require_own_width(params, floor)
        if has_state == (state is None):
            raise ValueError("has_state=True and the argument state= go together.")
        flags = _split.split_flags(batch, batch_axes)
        own = replicas
        if mesh is None:
            _replicas.require_bound(names)
            own = math.prod(jax.lax.axis_size(name) for name in names)
            _replicas.require_different(batch, flags, names)
        where = layout(
            params,
            names,
            own,
            reduce,
            param_specs,
            gather,
            () if mesh is None else tuple(mesh.axis_names),
        )
        _split.require_rows(batch, flags, microbatches, replicas)
        operands = Operands(batch, args, key, state, loss_scale)
        if mesh is None:
            result = local(where, params, operands, flags, microbatches)
            grads = where.gather_grads(result.grads)
        else:
            result = over_mesh(local, mesh, where, params, operands, flags, microbatches)
            grads = result.grads
        norm = accumulator.global_norm(grads) if grad_norm else None
        return (result.loss, result.info._replace(grad_norm=norm)), grads

    return fn

"""make_train_step: a group in, an update out, jitted and donated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from jax_accum import _accumulator as accumulator
from jax_accum import _counts
from jax_accum._checks import as_transformation
from jax_accum._compiled_step import CompiledStep
from jax_accum._group_grad import accumulated_value_and_grad
from jax_accum._guard import GuardedTransformation
from jax_accum._loss_scale import find_scales
from jax_accum._multi_steps import MultiSteps

Tree = Any


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation | MultiSteps,
    microbatches: int | None,
    *,
    has_aux: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    data_axes: str | tuple[str, ...] = ("data",),
    reduce: str = "once",
    accumulator_dtype: Any = None,
    coefficients: Mapping[str, float] | None = None,
    aux: Any = "stack",
    batch_axes: Any = 0,
    grad_norm: bool = True,
    has_state: bool = False,
    state_reduce: str = "mean",
    param_specs: Tree | None = None,
    gather: str = "group",
    references: bool = False,
    tokens_term: str | None = None,
    donate: bool = True,
) -> CompiledStep:
    """A compiled function from a group to an update: one dispatch, and nothing to wait for.

    Args:
      loss_fn: as for `accumulated_value_and_grad`.
      tx: the optimizer; it runs once per call. With a `guard` in it the state keeps the
        counters that `jax_accum.counts` reads, and a loss scale in it is applied to the loss
        here. The group of a call is whole: a `MultiSteps` of `k` around the optimizer
        accumulates over calls on top of it, an update every `k` calls.
      microbatches: A, into which the rows of a batch are cut; or `None` for batches that are
        grouped already, `[A, rows, ...]`, as those of `jax_accum.groups` are.
      has_aux: this and the following as for `accumulated_value_and_grad`.
      mesh: with it, parameters and state keep the shardings that they came with; what has
        none yet is put on all devices of the mesh (large optimizer state beside sharded
        parameters excepted: make it of them, `tx.init(params)` outside of jit).
      data_axes: see there.
      reduce: see there.
      accumulator_dtype: see there.
      coefficients: see there.
      aux: see there.
      batch_axes: see there.
      grad_norm: whether the metrics hold it; with a loss scale, it is that of the true gradient.
      has_state: see there.
      state_reduce: see there.
      param_specs: see there.
      gather: see there.
      references: see there.
      tokens_term: name of the term whose weight the counter `tokens` adds up; the only one
        if there is one.
      donate: hand the buffers of `params` and `opt_state` on to the results; the caller
        must not use the old ones again, and is told so by the next call.

    Returns:
      `step(params, opt_state, batch, *args, key=None, examples=None, state=None)`, with the
      methods of a jitted function (`lower` and so on), which returns
      `(params, opt_state, metrics)`. `examples` (a scalar) is for the counters. `metrics`:
      `loss`; `grad_norm`, normalised and before any clipping; `terms` and `weights` by name;
      `aux`; `state`, the mutable state; `updated`, whether the parameters changed. A group
      in which nothing has a weight is a skip: parameters and state stay as they are.

    Raises:
      TypeError: as `accumulated_value_and_grad`.
      ValueError: as `accumulated_value_and_grad`; parameters or a state that an earlier call
        was given to use up; rows sharded over devices, and no `mesh`.

    Example:
      >>> import jax.numpy as jnp, optax, jax_accum as ja
      >>> def loss_fn(w, batch):
      ...     return ja.Weighted(jnp.sum((w - batch) ** 2), batch.size)
      >>> tx = ja.guard(optax.sgd(0.5))
      >>> w = jnp.zeros(())
      >>> step = ja.make_train_step(loss_fn, tx, 2)
      >>> w, opt_state, metrics = step(w, tx.init(w), jnp.array([1.0, 2.0, 3.0, 6.0]))
      >>> float(w), float(metrics["loss"]), ja.counts(opt_state)["updates"]
      (3.0, 12.5, 1)
    """
    as_transformation(tx, "tx")  # or an error before anything is compiled
    value_and_grad = accumulated_value_and_grad(
        loss_fn,
        microbatches,
        has_aux=has_aux,
        mesh=mesh,
        data_axes=data_axes,
        reduce=reduce,
        accumulator_dtype=accumulator_dtype,
        coefficients=coefficients,
        aux=aux,
        batch_axes=batch_axes,
        grad_norm=grad_norm,
        has_state=has_state,
        state_reduce=state_reduce,
        param_specs=param_specs,
        gather=gather,
        references=references,
    )
    apply = _apply_multi_steps if isinstance(tx, MultiSteps) else _apply

    def step(
        params: Tree,
        opt_state: Any,
        batch: Tree,
        *args: Any,
        key: Any = None,
        examples: Any = None,
        state: Any = None,
    ) -> tuple[Tree, Any, dict[str, Any]]:
        scales = find_scales(opt_state)
        (loss, info), grads = value_and_grad(
            params,
            batch,
            *args,
            key=key,
            state=state,
            loss_scale=scales[0] if scales else None,
        )
        some = jnp.any(jnp.stack([w != 0 for w in info.weights.values()]))
        norm = info.grad_norm
        if scales and norm is not None:
            norm = norm / scales[0]
        only = next(iter(info.weights)) if len(info.weights) == 1 else None
        counted = tokens_term if tokens_term is not None else only
        params, opt_state, updated = apply(
            tx,
            params,
            opt_state,
            grads,
            some,
            # With several terms no one weight speaks for all: only whether there is any.
            weight=info.weights[only] if only else some.astype(jnp.float32),
            tokens=info.weights[counted] if counted else 0,
            examples=examples,
            microbatches=info.counts["microbatches"],
            value=loss,
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "terms": info.terms,
            "weights": info.weights,
            "aux": info.aux,
            "state": info.state,
            "updated": updated,
        }
        return params, opt_state, metrics

    return CompiledStep(step, donate=donate, mesh=mesh, splits=microbatches is not None)


def _apply_multi_steps(
    tx: MultiSteps, params: Tree, opt_state: Any, grads: Tree, some: jax.Array, **extra: Any
) -> tuple[Tree, Any, jax.Array]:
    params, opt_state = tx.apply(grads, opt_state, params, **extra)
    return params, opt_state, tx.has_updated(opt_state)


def _apply(
    tx: optax.GradientTransformation,
    params: Tree,
    opt_state: Any,
    grads: Tree,
    some: jax.Array,
    **extra: Any,
) -> tuple[Tree, Any, jax.Array]:
    """One update by `tx`; one that does not count itself is kept from groups without weight."""

    def run(params: Tree, state: Any) -> tuple[Tree, Any]:
        if isinstance(tx, GuardedTransformation):  # in place, without a tree of updates
            return tx.apply(grads, state, params, **extra)
        updates, new = optax.with_extra_args_support(tx).update(grads, state, params, **extra)
        new = jax.tree.map(accumulator.as_dtype_of, new, state)
        return optax.apply_updates(params, updates), new

    if _counts.has_counts(opt_state):
        params, after = run(params, opt_state)
        return params, after, _counts.outcome(opt_state, after).updated
    params, after = jax.lax.cond(some, run, lambda *same: same, params, opt_state)
    return params, after, some

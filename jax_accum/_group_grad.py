"""accumulated_value_and_grad: the loss and gradient of a whole group in one compiled call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_accum import _accumulator as accumulator
from jax_accum import _replicas, _split
from jax_accum._checks import checked_int
from jax_accum._group_loop import accumulate, group_loss, group_weights
from jax_accum._terms import as_terms, weights_only

Tree = Any


class GroupInfo(NamedTuple):
    """What a group came to, besides its loss and gradient.

    Attributes:
      terms: sum of each term over the group, by name; scalars.
      weights: what each sum is divided by; scalars, float32 (float64 in 64-bit mode).
      aux: what became of the auxiliary output of `loss_fn`; `()` without `has_aux`.
      counts: `microbatches` (of all replicas, to the last with a weight) and
        `computed` (those this replica passed forward and backward); int32 scalars.
      grad_norm: global norm of the gradient, scalar; `None` unless asked for.
    """

    terms: dict[str, jax.Array]
    weights: dict[str, jax.Array]
    aux: Any
    counts: dict[str, jax.Array]
    grad_norm: jax.Array | None


def accumulated_value_and_grad(
    loss_fn: Callable[..., Any],
    microbatches: int | None,
    *,
    has_aux: bool = False,
    axis_name: Any = None,
    accumulator_dtype: Any = None,
    coefficients: Mapping[str, float] | None = None,
    aux: Any = "stack",
    batch_axes: Any = 0,
    grad_norm: bool = False,
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
        them by term name, or with `has_aux` a pair of that and a tree of arrays.
        Weights must not depend on `params`. Given a `key`, it is called with `key=` too.
      microbatches: A, into which the rows of a batch are split, consecutive rows
        together. `None` takes a batch that is grouped already, `[A, m, ...]`.
      has_aux: whether `loss_fn` returns auxiliary output.
      axis_name: name, or tuple of names, of mapped axes over which the caller runs
        this (`jax.shard_map`, `jax.pmap`), each replica with microbatches of its own.
        Sums stay local and are reduced once, after the last microbatch.
      accumulator_dtype: widens the accumulators, and is then the dtype of the gradient.
        They are never narrower than float32 nor than the parameters.
      coefficients: :math:`c_t` by term name; 1 where not given.
      aux: `"stack"` (`[A, ...]`; zeros for microbatches not computed), `"sum"`, `"mean"`
        (by the weight of the microbatch; a loss of one term only) or `"last"` (of those
        computed), or a prefix tree of these.
      batch_axes: 0, or a prefix tree of 0 and `None`; leaves under `None` are handed to
        every microbatch whole.
      grad_norm: compute the global norm of the gradient too.

    Returns:
      `fn(params, batch, *args, key=None, loss_scale=None)`, which returns
      `((loss, info), grads)`: a scalar, a `GroupInfo`, and a tree like `params` in the
      dtypes of the parameters. `key` is folded with the index of the microbatch and
      of the replica, so that no randomness is used twice. `loss_scale` multiplies the
      gradient, not the loss. A group without any weight has loss 0 and gradient 0.

    Raises:
      TypeError: `loss_fn` returns a bare scalar; a parameter is not floating or complex.
      ValueError: rows that A does not divide, leaves of differing leading size, an
        empty batch, a weight that depends on the parameters, an unknown term.

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
    floor = accumulator.floor_dtype(accumulator_dtype)
    axes = _replicas.axis_names(axis_name)

    def fn(
        params: Tree, batch: Tree, *args: Any, key: Any = None, loss_scale: Any = None
    ) -> tuple[tuple[jax.Array, GroupInfo], Tree]:
        accumulator.require_gradients(params, params, "params", what="params")
        _replicas.require_bound(axes)
        flags = _split.split_flags(batch, batch_axes)
        rows = _split.rows_of(batch, flags)
        n = rows if microbatches is None else microbatches
        if microbatches is not None:
            _split.require_divisible(rows, n, 1, "batch")
            batch = jax.tree.map(lambda x, f: _split.split(x, n) if f else x, batch, flags)
        elif rows == 0:
            raise ValueError("batch has no microbatches.")

        def microbatch(a: Any) -> tuple[Any, ...]:
            part = jax.tree.map(
                lambda x, f: (
                    jax.lax.dynamic_index_in_dim(jnp.asarray(x), a, 0, keepdims=False) if f else x
                ),
                batch,
                flags,
            )
            return (part, args, _key_for(key, a, axes))

        def terms_and_aux(params: Tree, part: Tree, args: Any, key: Any) -> tuple[Any, Any]:
            out = (
                loss_fn(params, part, *args)
                if key is None
                else loss_fn(params, part, *args, key=key)
            )
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError("with has_aux=True loss_fn must return a pair (terms, aux).")
            value, extra = out if has_aux else (out, ())
            return as_terms(value), extra

        local = _replicas.as_varying(params, axes) if axes else params
        example = jax.eval_shape(microbatch, 0)
        weight_fn = weights_only(lambda *a: terms_and_aux(*a)[0], local, *example)
        each = jax.lax.map(lambda a: weight_fn(*microbatch(a)), jnp.arange(n))
        weights = group_weights(each, coefficients, axes)
        sums, grads, extra = accumulate(
            terms_and_aux,
            local,
            microbatch,
            weights,
            size=n,
            scale=loss_scale,
            floor=floor,
            aux_how=aux,
            axes=axes,
        )
        seen = weights.own
        if axes:
            sums, grads, seen = jax.lax.psum((sums, grads, seen), axes)
        if accumulator_dtype is None:
            grads = jax.tree.map(accumulator.as_dtype_of, grads, params)
        info = GroupInfo(
            terms=sums,
            weights=weights.totals,
            aux=extra,
            counts={"microbatches": seen, "computed": weights.active},
            grad_norm=accumulator.global_norm(grads) if grad_norm else None,
        )
        return (group_loss(sums, weights.totals, coefficients), info), grads

    return fn


def _key_for(key: Any, index: Any, axes: tuple[Any, ...]) -> Any:
    """A key of its own for every microbatch of every replica."""
    if key is None:
        return None
    if axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(axes))
    return jax.random.fold_in(key, index)

"""A group run by one replica, or by every replica of a mesh, and reduced once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jax_accum import _accumulator as accumulator
from jax_accum import _aux, _replicas, _split
from jax_accum._group_loop import accumulate, group_loss, group_weights
from jax_accum._layout import Layout
from jax_accum._terms import as_terms, weights_only
from jax_accum._weighted import Weighted

Tree = Any


class GroupInfo(NamedTuple):
    """What a group came to, besides its loss and gradient.

    Attributes:
      terms: sum of each term over the group, by name; scalars.
      weights: what each sum is divided by; scalars, float32 (float64 in 64-bit mode).
      aux: what became of the auxiliary output of `loss_fn`; `()` without `has_aux`.
      counts: `microbatches` (of all replicas, each to its last with a weight) and
        `computed` (turns of the loop, the same on all replicas. Without auxiliary output and
        state, and with `reduce="once"`: the microbatches with a weight, of the replica with
        the most. Else those up to the last with a weight on any replica).
      grad_norm: global norm of the gradient, scalar; `None` unless asked for.
      state: the mutable state after the last microbatch; `()` without `has_state`.
    """

    terms: dict[str, jax.Array]
    weights: dict[str, jax.Array]
    aux: Any
    counts: dict[str, jax.Array]
    grad_norm: jax.Array | None
    state: Any


class Operands(NamedTuple):
    """What the function is called with, besides the parameters."""

    batch: Tree
    args: tuple[Any, ...]
    key: Any
    state: Any
    loss_scale: Any


class Result(NamedTuple):
    """What one replica comes to, reduced; `how` says what became of `info.aux`."""

    loss: jax.Array
    info: GroupInfo
    grads: Tree
    how: Tree


@dataclasses.dataclass(frozen=True)
class Local:
    """The part of a group that one replica computes, and its reduction."""

    loss_fn: Callable[..., Any]
    _: dataclasses.KW_ONLY
    has_aux: bool
    has_state: bool
    coefficients: Mapping[str, float] | None
    aux: Any
    floor: Any
    narrow: bool
    state_reduce: str
    references: bool = False

    def __call__(
        self,
        where: Layout,
        params: Tree,
        operands: Operands,
        flags: Tree,
        microbatches: int | None,
    ) -> Result:
        batch, args, key, state, loss_scale = operands
        if microbatches is not None:
            batch = jax.tree.map(
                lambda x, f: _split.split(x, microbatches) if f else x, batch, flags
            )
        size = _split.rows_of(batch, flags)

        def part(a: Any) -> tuple[Any, Any, Any]:
            return (_split.take(batch, flags, a), args, _key_for(key, a, where.axes))

        def forward(params: Tree, a: Any, state: Any) -> tuple[Any, tuple[Any, Any]]:
            terms, aux, state = self.call(params, *part(a), state)
            return {name: jnp.asarray(term.total) for name, term in terms.items()}, (aux, state)

        params = _replicas.as_varying(params, where.axes)
        shapes = jax.eval_shape(where.gather, params)
        weight_fn = weights_only(
            lambda params, batch, args, key: self.call(params, batch, args, key, state)[0],
            shapes,
            *jax.eval_shape(part, 0),
        )
        each = jax.lax.map(lambda a: weight_fn(*part(a)), jnp.arange(size))
        weights = group_weights(each, self.coefficients, where.axes)
        _, (aux, _) = jax.eval_shape(forward, shapes, 0, state)
        how = _aux.spread(self.aux, aux, list(each))
        sums = accumulate(
            forward,
            params,
            state,
            weights,
            where,
            scale=loss_scale,
            floor=self.floor,
            aux_how=how,
            references=self.references,
        )
        terms, seen, grads = sums.terms, weights.own, where.reduce(sums.grads)
        if where.axes:
            terms, seen = jax.lax.psum((terms, seen), where.axes)
        if self.narrow:
            grads = jax.tree.map(accumulator.as_dtype_of, grads, params)
        info = GroupInfo(
            terms=terms,
            weights=weights.totals,
            aux=_aux.finish(how, sums.aux, weights.totals[next(iter(each))], where.axes),
            counts={"microbatches": seen, "computed": weights.active},
            grad_norm=None,
            state=_replicas.reduced_state(sums.state, self.state_reduce, where.axes)
            if self.has_state
            else (),
        )
        return Result(group_loss(terms, weights.totals, self.coefficients), info, grads, how)

    def call(
        self, params: Tree, part: Any, args: Any, key: Any, state: Any
    ) -> tuple[Any, Any, Any]:
        """Calls the loss function: terms, auxiliary output, state."""
        given = {} if key is None else {"key": key}
        if self.has_state:
            given["state"] = state
        try:
            out = self.loss_fn(params, part, *args, **given)
        except Exception as error:
            error.add_note(
                f"loss_fn was called on a microbatch with the leaves {_described(part)}. A batch "
                "is cut into microbatches along its first axis; with microbatches=None it is taken "
                "as grouped already, [A, rows, ...]."
            )
            raise
        wanted = 1 + self.has_aux + self.has_state
        if wanted == 1:
            return as_terms(out), (), state
        if not isinstance(out, tuple) or isinstance(out, Weighted) or len(out) != wanted:
            raise TypeError(
                f"with has_aux={self.has_aux} and has_state={self.has_state} loss_fn must return "
                f"a tuple of {wanted}, terms first; got {type(out).__name__}."
            )
        aux = out[1] if self.has_aux else ()
        return as_terms(out[0]), aux, out[-1] if self.has_state else state


def over_mesh(
    local: Local,
    mesh: Mesh | AbstractMesh,
    where: Layout,
    params: Tree,
    operands: Operands,
    flags: Tree,
    microbatches: int | None,
) -> Result:
    """Runs `local` on every replica of a mesh; axes other than the data axes stay automatic."""
    same: Any = PartitionSpec()
    rows = (
        PartitionSpec(where.axes) if microbatches is not None else PartitionSpec(None, where.axes)
    )
    batch_specs = jax.tree.map(lambda f: rows if f else same, flags)
    hows: list[Tree] = []  # known once the loss function has been traced

    def body(params: Tree, operands: Operands) -> tuple[Result, dict[str, list[jax.Array]]]:
        result = local(where, params, operands, flags, microbatches)
        hows.append(result.how)
        parts = _aux.parted(result.how, result.info.aux)
        return result._replace(info=result.info._replace(aux=()), how=()), parts

    # Unchecked: the caller's model need not know of the data axes, and the gradient of
    # a replicated parameter stays this replica's own until it is reduced here.
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(where.specs(where.params), Operands(batch_specs, same, same, same, same)),
        out_specs=(Result(same, same, where.specs(where.grads), same), _aux.specs(where.axes)),
        axis_names=set(where.axes),
        check_vma=False,
    )
    # Compiled even where the caller does not: outside of jit, JAX 0.10 knows no automatic axes.
    result, parts = jax.jit(mapped)(params, operands)
    return result._replace(info=result.info._replace(aux=_aux.joined(hows[-1], parts)))


def _described(part: Any) -> str:
    """Names, dtypes and shapes of the leaves of a microbatch, the first few."""
    leaves = jax.tree_util.tree_leaves_with_path(part)
    named = [
        f"{jax.tree_util.keystr(path, simple=True, separator='/') or 'batch'}: {jax.typeof(x)}"
        for path, x in leaves[:8]
    ]
    return ", ".join(named + ["..."] * (len(leaves) > 8))


def _key_for(key: Any, index: Any, axes: tuple[Any, ...]) -> Any:
    """A key of its own for every microbatch of every replica."""
    if key is None:
        return None
    if axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(axes))
    return jax.random.fold_in(key, index)

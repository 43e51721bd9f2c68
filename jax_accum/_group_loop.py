"""The loop over the microbatches of a group: weights first, then one accumulator for all terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_accum import _accumulator as accumulator
from jax_accum import _aux, _replicas

Tree = Any
Scalars = dict[str, jax.Array]


class GroupWeights(NamedTuple):
    """The weights of a group, all known before its first backward pass.

    Attributes:
      each: `[A]` per term: the weight of each microbatch of this replica.
      totals: scalar per term: the denominator, over the group and all replicas.
      seeds: `[A]` per term: what the gradient of a microbatch's sum is multiplied by,
        coefficient over denominator; 0 where its weight is 0.
      counts: `[A]`, bool: microbatches in which any term has a weight.
      active: scalar, int32: microbatches up to the last that counts on any replica.
      own: scalar, int32: the same of this replica.
      mixed: scalar, bool: some microbatch has terms with and terms without a weight.
    """

    each: Scalars
    totals: Scalars
    seeds: Scalars
    counts: jax.Array
    active: jax.Array
    own: jax.Array
    mixed: jax.Array


def group_weights(
    each: Scalars, coefficients: Mapping[str, float] | None, axes: tuple[Any, ...]
) -> GroupWeights:
    """Denominators and seeds from the weights of each microbatch, `[A]` per term.

    Raises:
      ValueError: a coefficient for a term that `loss_fn` does not return.
    """
    given = dict(coefficients or {})
    if unknown := sorted(set(given) - set(each)):
        raise ValueError(
            f"coefficients names the terms {unknown}, but loss_fn returns {sorted(each)}."
        )
    totals = {name: jnp.sum(w) for name, w in each.items()}
    has = jnp.stack([w != 0 for w in each.values()])
    counts = jnp.any(has, axis=0)
    own = jnp.max(jnp.where(counts, jnp.arange(1, counts.size + 1), 0)).astype(jnp.int32)
    active, mixed = own, jnp.any(counts & ~jnp.all(has, axis=0))
    if axes:
        totals = jax.lax.psum(totals, axes)
        active, mixed = jax.lax.pmax((active, mixed.astype(jnp.int32)), axes)
        mixed = mixed != 0
    seeds = {}
    for name, w in each.items():
        # The reciprocal once, as a scalar; a total of 0 leaves no microbatch to seed.
        seed = given.get(name, 1.0) / jnp.where(totals[name] == 0, 1, totals[name])
        seeds[name] = jnp.where(w == 0, 0, seed)
    return GroupWeights(each, totals, seeds, counts, active, own, mixed)


def group_loss(
    sums: Scalars, totals: Scalars, coefficients: Mapping[str, float] | None
) -> jax.Array:
    """Sum over the terms of coefficient * sum / weight; a term without weight adds 0."""
    given = dict(coefficients or {})
    parts = [
        given.get(name, 1.0)
        * jnp.where(totals[name] == 0, 0, s)
        / jnp.where(totals[name] == 0, 1, totals[name]).astype(s.dtype)
        for name, s in sums.items()
    ]
    return jnp.sum(jnp.stack(parts))


def accumulate(
    terms_and_aux: Callable[..., tuple[Any, Any]],
    params: Tree,
    microbatch: Callable[[Any], tuple[Any, ...]],
    weights: GroupWeights,
    *,
    size: int,
    scale: Any,
    floor: Any,
    aux_how: Any,
    axes: tuple[Any, ...],
) -> tuple[Scalars, Tree, Any]:
    """Runs the microbatches of one replica forward and backward.

    Args:
      terms_and_aux: `(params, *microbatch(a))` to terms by name and auxiliary output.
      params: parameters; varying over `axes` where JAX tracks that.
      microbatch: from an index to the further arguments.
      weights: of the group.
      size: A.
      scale: loss scale or `None`.
      floor: the narrowest dtype of an accumulator.
      aux_how: what to do with the auxiliary output.
      axes: bound axes over which replicas differ.

    Returns:
      Sums by term, the accumulated gradient (normalised, this replica's share) and the
      auxiliary output.
    """
    names = list(weights.each)

    def forward(params: Tree, a: Any) -> tuple[Scalars, Any]:
        terms, aux = terms_and_aux(params, *microbatch(a))
        return {name: jnp.asarray(terms[name].total) for name in names}, aux

    def one(a: Any, apart: bool) -> tuple[Scalars, list[tuple[jax.Array, Tree]], Any]:
        """Sums of microbatch `a`, and gradients with whether they count."""
        totals, pull, aux = jax.vjp(lambda p: forward(p, a), params, has_aux=True)
        seeds = {name: weights.seeds[name][a] for name in names}
        if scale is not None:
            seeds = {name: seed * scale for name, seed in seeds.items()}
        seeds = {name: seed.astype(totals[name].dtype) for name, seed in seeds.items()}
        if axes:  # a cotangent has the type of its value
            seeds = _replicas.as_varying(seeds, axes)
        if not apart:
            return totals, [(weights.counts[a], pull(seeds)[0])], aux
        none = {name: jnp.zeros_like(seed) for name, seed in seeds.items()}
        pulls = [
            (weights.each[name][a] != 0, pull(none | {name: seeds[name]})[0]) for name in names
        ]
        return totals, pulls, aux

    shapes, aux_shapes = jax.eval_shape(forward, params, 0)
    how = _aux.spread(aux_how, aux_shapes)
    if len(names) > 1 and "mean" in jax.tree.leaves(how):
        raise ValueError(
            f"aux='mean' does not know by which of the weights {names}: use 'sum' and divide, "
            "or return the metric as a term with coefficient 0."
        )
    first = names[0]

    def take(a: Any, so_far: tuple[Any, Any, Any], apart: bool) -> tuple[Any, Any, Any]:
        sums, acc, extra = so_far
        totals, pulls, aux = one(a, apart)
        sums = {
            name: s + jnp.where(weights.each[name][a] == 0, 0, totals[name].astype(s.dtype))
            for name, s in sums.items()
        }
        for counts, grads in pulls:
            acc = jax.tree.map(lambda x, g: x + jnp.where(counts, g.astype(x.dtype), 0), acc, grads)  # noqa: B023
        return sums, acc, _aux.add(how, extra, aux, a, weights.each[first][a])

    def start(params: Tree) -> tuple[Any, Any, Any]:
        sums = {
            name: jnp.zeros((), jnp.promote_types(s.dtype, jnp.float32))
            for name, s in shapes.items()
        }
        extra = _aux.start(how, aux_shapes, size)
        sums, extra = _replicas.as_varying((sums, extra), axes) if axes else (sums, extra)
        return sums, accumulator.zeros_like(params, floor=floor), extra

    def loop(params: Tree, apart: bool) -> tuple[Any, Any, Any]:
        if size == 1:
            return take(0, start(params), apart)
        return jax.lax.fori_loop(
            0, weights.active, lambda a, so_far: take(a, so_far, apart), start(params)
        )

    if len(names) == 1:
        sums, acc, extra = loop(params, False)
    else:
        # One backward pass serves all terms, unless some term weighs nothing where others
        # do: its gradient may then hold NaN, which only a pass of its own keeps out.
        sums, acc, extra = jax.lax.cond(
            weights.mixed, lambda p: loop(p, True), lambda p: loop(p, False), params
        )
    return sums, acc, _aux.finish(how, extra, weights.totals[first])

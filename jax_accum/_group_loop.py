"""The loop over the microbatches of a group: weights first, then one accumulator for all terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_accum import _accumulator as accumulator
from jax_accum import _aux
from jax_accum._layout import Layout
from jax_accum._replicas import as_varying

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


class Sums(NamedTuple):
    """What the loop carries from microbatch to microbatch.

    Attributes:
      terms: sum of each term, scalars.
      grads: accumulators, normalised; this replica's share.
      aux: auxiliary output so far.
      state: the caller's mutable state.
      computed: scalar, int32, when the loop has ended: the turns it took.
    """

    terms: Scalars
    grads: Tree
    aux: Any
    state: Any
    computed: Any = ()


def accumulate(
    forward: Callable[[Tree, Any, Any], tuple[Scalars, tuple[Any, Any]]],
    params: Tree,
    state: Any,
    weights: GroupWeights,
    layout: Layout,
    *,
    scale: Any,
    floor: Any,
    aux_how: Any,
    references: bool = False,
) -> Sums:
    """Runs the microbatches of one replica forward and backward.

    Args:
      forward: `(params, index, state)` to the sums by term, and auxiliary output and state.
      params: parameters, or this replica's shards of them as `layout` says.
      state: mutable state that the microbatches hand on.
      weights: of the group.
      layout: of parameters and accumulators.
      scale: loss scale, or `None`.
      floor: the narrowest dtype of an accumulator.
      aux_how: what to do with the auxiliary output, a tree like it.
      references: add to the accumulators inside the backward pass, in place.
    """
    names = list(weights.each)
    size = weights.counts.size
    whole = params if layout.gather_each else layout.gather(params)

    def add(acc: Tree, grads: Tree, counts: jax.Array | None = None) -> Tree:
        grads = jax.tree.map(partial(_widened, floor), grads)
        if counts is not None:  # 0 where it does not count, even for NaN
            grads = jax.tree.map(lambda g: jnp.where(counts, g, 0), grads)
        return jax.tree.map(jnp.add, acc, layout.scatter(grads) if layout.each else grads)

    def seeds_at(a: Any, totals: Scalars) -> Scalars:
        seeds = {name: weights.seeds[name][a] for name in names}
        if scale is not None:
            seeds = {name: seed * scale for name, seed in seeds.items()}
        seeds = {name: seed.astype(totals[name].dtype) for name, seed in seeds.items()}
        return as_varying(seeds, layout.axes)  # a cotangent has the type of its value

    def each_term(acc: Tree, params: Tree, seeds: Scalars, a: Any, state: Any) -> Tree:
        """Adds the gradient of microbatch `a`, a backward pass for each term.

        Each term is differentiated by itself: with a cotangent of 0 for the others, their NaN
        would come through as 0 * NaN.
        """
        for name in names:
            _, pull = jax.vjp(lambda p, name=name: forward(p, a, state)[0][name], params)
            # Wait for the term before, so that there is one gradient at a time.
            seed, acc = jax.lax.optimization_barrier((seeds[name], acc))
            acc = add(acc, pull(seed)[0], weights.each[name][a] != 0)
        return acc

    def take(
        a: Any,
        so_far: Sums,
        params: Tree,
        apart: bool,
        refs: Tree = None,
        live: Any = None,
    ) -> Sums:
        params = layout.gather_in(a, params) if layout.gather_each else params
        pull: Any
        totals, pull, (aux, state) = jax.vjp(
            lambda p: forward(p, a, so_far.state), params, has_aux=True
        )
        terms = {
            name: s + jnp.where(weights.each[name][a] == 0, 0, totals[name].astype(s.dtype))
            for name, s in so_far.terms.items()
        }
        seeds = seeds_at(a, totals)
        if apart:
            acc = each_term(so_far.grads, params, seeds, a, so_far.state)
        elif live is None:
            acc = add(so_far.grads, pull(seeds)[0], weights.counts[a])
        else:
            if live is not True:
                seeds = {name: jnp.where(live, seed, 0) for name, seed in seeds.items()}
            if refs is None:
                acc = add(so_far.grads, pull(seeds)[0])
            else:
                _pull_into(pull, refs, seeds)
                acc = so_far.grads
        aux = _aux.add(aux_how, so_far.aux, aux, a, weights.each[names[0]][a])
        return Sums(terms, acc, aux, jax.tree.map(accumulator.as_dtype_of, state, so_far.state))

    totals, (aux, _) = jax.eval_shape(forward, _shapes(whole, params, layout), 0, state)

    def start(params: Tree) -> Sums:
        terms = {
            name: jnp.zeros((), jnp.promote_types(total.dtype, jnp.float32))
            for name, total in totals.items()
        }
        # Where the parameters are still shards, what is gathered here gives a shape only.
        shaped = layout.gather(params) if layout.gather_each else params
        grads = accumulator.zeros_like(shaped, floor=floor)
        extra = _aux.start(aux_how, aux, size)
        terms, extra, own = as_varying((terms, extra, state), layout.axes)
        return Sums(terms, layout.shards(grads), extra, own)

    def loop(params: Tree, apart: bool) -> Sums:
        if size == 1:
            return take(0, start(params), params, apart)._replace(computed=weights.active)
        if not apart and (references or only_counted):
            return counted(params)
        sums = jax.lax.fori_loop(
            0, weights.active, lambda a, sums: take(a, sums, params, apart), start(params)
        )
        return sums._replace(computed=weights.active)

    # Where nobody can tell what was run (no auxiliary output or state is handed on), what counts
    # is run and nothing else. Then no gradient has to be masked, which costs the memory of the
    # largest one that XLA does not fuse (an embedding's). Into references nothing can be masked.
    only_counted = not (layout.each or jax.tree.leaves((aux, state)))

    def counted(params: Tree) -> Sums:
        """Runs the microbatches that count. All replicas take the same number of turns.

        As a collective in the loss needs. A replica with fewer takes its first one again, with
        seeds of 0.
        """
        own = jnp.sum(weights.counts, dtype=jnp.int32)
        turns = jax.lax.pmax(own, layout.axes) if layout.axes else own
        order = jnp.argsort(~weights.counts, stable=True)
        order = jnp.where(jnp.arange(size) < own, order, order[0])
        sums, refs = start(params), None
        if references:
            refs = jax.tree.map(jax.new_ref, sums.grads)
            sums = sums._replace(grads=jax.tree.map(lambda _: None, refs))

        # The turn before looks up the number of the microbatch: looked up in its own, XLA does so
        # again for every number of the batch that the loss reads.
        def turn(i: Any, carry: tuple[jax.Array, Sums]) -> tuple[jax.Array, Sums]:
            a, sums = carry
            following = order[i + 1]
            if not layout.axes:
                return following, take(a, sums, params, False, refs, live=True)
            live = i < own
            after = take(a, sums, params, False, refs, live=live)
            grads, before = after.grads, sums._replace(grads=())
            after = jax.tree.map(partial(jnp.where, live), after._replace(grads=()), before)
            return following, after._replace(grads=grads)

        _, sums = jax.lax.fori_loop(0, turns, turn, (order[0], sums))
        grads = sums.grads if refs is None else jax.tree.map(jax.freeze, refs)
        if layout.axes:  # where nothing counts, 0 times a NaN may stand
            grads = jax.tree.map(lambda acc: jnp.where(own == 0, 0, acc), grads)
        return sums._replace(grads=grads, computed=turns)

    if len(names) == 1:
        return loop(whole, False)
    # One backward pass serves all terms, unless some term weighs nothing where others
    # do: its gradient may then hold NaN, which only a pass of its own keeps out.
    return jax.lax.cond(weights.mixed, lambda p: loop(p, True), lambda p: loop(p, False), whole)


def _pull_into(pull: Any, refs: Tree, seeds: Scalars) -> None:
    """Adds the gradient to the references.

    Raises:
      TypeError: JAX has no rule for it (0.10: a parameter that is sliced with fixed bounds).
    """
    try:
        pull.with_refs(refs)(seeds)
    except TypeError as error:
        raise TypeError(
            "references=True: this version of JAX cannot add to a reference through some operation "
            "of loss_fn, most likely a parameter sliced directly, as in params['x'][:n] or "
            "params['x'][0]. Split that parameter, use jax.lax.dynamic_slice_in_dim, or leave "
            "references out."
        ) from error


def _widened(floor: Any, grad: jax.Array) -> jax.Array:
    """A gradient in the dtype of its accumulator."""
    return grad.astype(jnp.promote_types(grad.dtype, floor))


def _shapes(whole: Tree, params: Tree, layout: Layout) -> Tree:
    """The shapes of whole parameters, where they are still to be gathered."""
    return jax.eval_shape(layout.gather, params) if layout.gather_each else whole

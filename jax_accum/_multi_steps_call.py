"""One call of `MultiSteps`: a microbatch enters the open group, and the group may end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_accum import _accumulator as accumulator
from jax_accum import _counts, _replicas
from jax_accum._checks import as_k, check_flag, check_weight
from jax_accum._multi_steps_state import (
    MultiStepsState,
    is_empty,
    is_stacked,
    stacked,
    unstacked,
)

Tree = Any
Finish = Callable[[Tree], Tree]
"""From the sums of a group to the gradient that the inner optimizer sees."""


class Rules(NamedTuple):
    """How groups are made, fixed by the constructor.

    Attributes:
      constant_k: microbatches per group, or `None` if a schedule tells.
      schedule: from the number of updates to the microbatches per group.
      normalise: divide by the weight of the group.
      scale: multiply a gradient by its weight.
      should_skip: the user's function, or `None`.
      floor: the narrowest dtype of an accumulator.
      axes: names of the mapped axes over which microbatches differ.
      compensated: keep a compensation term.
    """

    constant_k: int | None
    schedule: Callable[[jax.Array], Any]
    normalise: bool
    scale: bool
    should_skip: Callable[..., tuple[Any, Any]] | None
    floor: Any
    axes: tuple[Any, ...]
    compensated: bool

    def k(self, gradient_step: jax.Array) -> jax.Array:
        """Microbatches in the group after so many updates; int32 scalar."""
        return as_k(self.schedule(gradient_step))


class Microbatch(NamedTuple):
    """What a call hands over; see `MultiSteps.update` for the meaning of each."""

    grads: Tree
    weight: Any
    examples: Any
    flush: Any
    microbatches: Any
    tokens: Any


class Call(NamedTuple):
    """A call whose microbatch is in the group.

    Attributes:
      before: the state that came in.
      state: the state with the microbatch in its group, and no leading axis over replicas.
      like: a tree with the structure and dtypes of the gradients.
      params: the parameters, if given.
      sums: sums over the group.
      divides: the sums are to be divided by the weight of the group.
      first: the microbatch opened the group.
      full: the group is full; True where it always is.
      flush: the caller ends the group.
      weighted: the weight of the group may be 0, or not a number.
    """

    before: MultiStepsState
    state: MultiStepsState
    like: Tree
    params: Tree | None
    sums: Tree
    divides: bool
    first: jax.Array
    full: bool | jax.Array
    flush: bool | jax.Array
    weighted: bool


def enter(rules: Rules, batch: Microbatch, state: MultiStepsState, params: Tree | None) -> Call:
    """Takes the microbatch into the open group, and sees whether that fills it."""
    flush = check_flag(batch.flush, "flush")
    w = None if batch.weight is None else check_weight(batch.weight)
    _replicas.require_bound(rules.axes)
    own = unstacked(state) if rules.axes and is_stacked(state) else state
    keeps = rules.constant_k != 1 or not is_empty(own.acc_grads)
    grads = batch.grads

    skip: Any = grads is None
    skip_state = state.skip_state
    if grads is not None:
        grads = _checked(rules, grads, own, params, keeps)
        if rules.should_skip is not None:
            skip, skip_state = rules.should_skip(grads, state.gradient_step, params)
            skip = check_flag(skip, "the first result of should_skip_update_fn")
    if skip is not False:  # what is rejected weighs nothing
        w = jnp.where(skip, 0, jnp.ones_like(own.group.weight) if w is None else w)

    first = own.mini_step == 0

    def so_far(x: jax.Array) -> jax.Array:
        return jnp.where(first, jnp.zeros_like(x), x)

    def kept(x: jax.Array) -> jax.Array:
        return jnp.where(skip, jnp.zeros_like(x), x)

    tokens = batch.weight if batch.tokens is None else batch.tokens
    seen = _counts.seen_in(batch.microbatches, batch.examples, tokens)
    k = rules.k(state.gradient_step)
    group = own.group._replace(
        weight=so_far(own.group.weight) + (1 if w is None else w.astype(own.group.weight.dtype)),
        seen=_counts.add(jax.tree.map(so_far, own.group.seen), jax.tree.map(kept, seen)),
        k=jnp.where(first, k, jnp.minimum(own.group.k, k)),
    )
    mini_step = own.mini_step + 1 - jnp.asarray(skip, jnp.int32)
    full = mini_step >= group.k if keeps or skip is not False else True
    after = own._replace(mini_step=mini_step, skip_state=skip_state, group=group)

    if keeps and grads is not None:
        acc, comp = accumulator.add(own.acc_grads, own.compensation, grads, w, rules.scale, first)
        after = after._replace(acc_grads=acc, compensation=comp)
    like = next((t for t in (grads, params) if t is not None), after.acc_grads)

    divides = rules.normalise
    if keeps:
        sums = after.acc_grads
    elif grads is None:
        sums = accumulator.zeros_like(like, floor=rules.floor)
    elif rules.scale and rules.normalise and not rules.axes:
        sums, divides = grads, False  # a group of one: w * g / w is g, bit for bit
    else:
        sums = accumulator.contributions(grads, w, rules.scale, rules.floor)
    return Call(state, after, like, params, sums, divides, first, full, flush, w is not None)


def _checked(
    rules: Rules, grads: Tree, own: MultiStepsState, params: Tree | None, keeps: bool
) -> Tree:
    """The gradients as arrays, if they may be added."""
    if keeps:
        accumulator.require_gradients(grads, own.acc_grads, "the accumulator")
        accumulator.require_width(grads, own.acc_grads)
    else:
        accumulator.require_gradients(grads, grads if params is None else params, "params")
    accumulator.require_reduced(grads)
    if _replicas.is_tracked(rules.axes):
        _replicas.require_varying(grads, rules.axes, "updates")
    return jax.tree.map(jnp.asarray, grads)


def leave(
    rules: Rules,
    call: Call,
    attempt: Callable[[Tree, Finish, Any, Tree | None], tuple[Tree, Any]],
    hold: Callable[[Tree, Tree | None], Tree],
    given: Callable[[Any, _counts.Outcome], Any] | None = None,
) -> tuple[Tree, MultiStepsState]:
    """Ends the group if this call fills it: reduce, normalise, update, count; in this order.

    What a branch may change it gets as an operand, and the branch that changes
    nothing is the one taken when the predicate is false: with the two swapped,
    XLA copied parameters and inner state (3 trees with Adam) in every call.

    Args:
      rules: those of the constructor.
      call: what `enter` returned.
      attempt: `(sums, finish, inner_state, params)` to what is handed out and the new inner
        state; runs the inner optimizer on `finish(sums)`.
      hold: what is handed out where there is no update, from the sums and the parameters.
      given: if there is one, the accumulator lends its memory to what is handed out: `attempt`
        and `hold` return leaves like those of the accumulator, `hold` the sums as they are, and
        zeros are put in place of them unless `given(tried, outcome)`. A group that has ended
        needs its sums no more, and a branch that made zeros would cost a tree of memory, and
        the time to write it.
    """
    before, group = call.before, call.state.group
    operands = (call.sums, call.params, before.inner_opt_state)
    ends = call.full if call.full is True else call.full | call.flush

    def tried(sums: Tree, params: Tree | None, inner: Any, weight: jax.Array) -> Any:
        finish = partial(_mean, call, weight=weight, params=params)
        out, new = attempt(sums, finish, inner, params)
        new = jax.tree.map(accumulator.as_dtype_of, new, inner)
        return out, new, _counts.marks(inner, new)

    def held(sums: Tree, params: Tree | None, inner: Any, weight: jax.Array) -> Any:
        return hold(sums, params), inner, _counts.no_marks(inner)

    def closed(sums: Tree, params: Tree | None, inner: Any) -> Any:
        sums, weight = jax.lax.psum((sums, group.weight), rules.axes)
        seen = _counts.psum(group.seen, rules.axes)
        some = weight != 0 if call.weighted else jnp.ones((), bool)
        results = _if(some if call.weighted else True, tried, held, sums, params, inner, weight)
        return *results, seen, some

    def stay(sums: Tree, params: Tree | None, inner: Any) -> Any:
        nothing = _counts.zero_seen(), jnp.zeros((), bool)
        return hold(sums, params), inner, _counts.no_marks(inner), *nothing

    some: Any = True
    if rules.axes:
        out, inner, came_to, seen, some = _if(ends, closed, stay, *operands)
    else:
        seen = group.seen
        some = group.weight != 0 if call.weighted else True
        tries = some if ends is True else ends & some
        out, inner, came_to = _if(tries, tried, held, *operands, group.weight)

    # A call that brings nothing to an empty group, and flushes it, is no attempt.
    counted = ends & (call.full | some | ~call.first)
    outcome = _counts.outcome_of(came_to, ends & some)
    state = call.state
    if given is not None:
        state = state._replace(acc_grads=out)
        really = given(ends & some, outcome)
        out = jax.tree.map(lambda x: jnp.where(really, x, 0), out)
    state = state._replace(
        mini_step=jnp.where(ends, 0, state.mini_step),
        gradient_step=jnp.where(
            outcome.updated, optax.safe_increment(before.gradient_step), before.gradient_step
        ),
        inner_opt_state=inner,
        counts=_counts.closed(before.counts, seen, outcome, counted),
        updated=outcome.updated,
    )
    return out, stacked(state) if is_stacked(before) else state


def _if(pred: Any, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
    """`lax.cond`, or `yes` alone where `pred` is True whatever happens."""
    return yes(*operands) if pred is True else jax.lax.cond(pred, yes, no, *operands)


def _mean(call: Call, sums: Tree, *, weight: jax.Array, params: Tree | None) -> Tree:
    """What the inner optimizer sees of a group: its mean or sum, in the dtype for it."""
    if call.divides:
        sums = accumulator.scaled(sums, 1 / weight)
    elif call.weighted:  # a weight that is not a number spoils what it did not multiply, too
        sums = accumulator.scaled(sums, jnp.where(jnp.isnan(weight), weight, 1))
    return accumulator.cast_for_inner(sums, call.like, params)

"""guard: skips an attempt whose gradient is not finite, and keeps the loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_accum import _accumulator as accumulator
from jax_accum import _counts, _replicas
from jax_accum._checks import as_transformation, check_weight, checked_int
from jax_accum._loss_scale import DynamicLossScale

Tree = Any


class GuardState(NamedTuple):
    """State of `guard`.

    Attributes:
      inner_state: state of the wrapped optimizer.
      counts: what the attempts came to.
      consecutive_skips: scalar, int32. Non-finite attempts in a row; stays at 2^31 - 1.
      exhausted: scalar, bool. Whether there were ever too many of them; `check` raises on it.
      loss_scale: state of the loss scale, or `()`.
    """

    inner_state: Any
    counts: _counts.Counts
    consecutive_skips: jax.Array
    exhausted: jax.Array
    loss_scale: Any


class GuardedTransformation(optax.GradientTransformationExtraArgs):
    """What `guard` returns: an Optax transformation, and the same with the parameters in place.

    Attributes:
      attempt: `(sums, finish, state, params, in_place=False, lends=False, **extra_args)`: guards
        `finish(sums)`, which so never needs a buffer of its own. Returns updates, or with
        `in_place` the parameters, and the new state. A skip hands back the very parameters,
        where adding a zero would turn -0.0 into 0.0. With `lends` the updates have the dtypes
        of `sums`, and a skip hands back the sums: the caller puts zeros in their place.
    """

    attempt: Callable[..., tuple[Any, Any]]

    def apply(
        self, grads: Tree, state: GuardState, params: Tree, **extra_args: Any
    ) -> tuple[Tree, GuardState]:
        """The parameters and the state after an attempt; arguments are those of `update`."""
        return self.attempt(grads, _as_is, state, params, in_place=True, **extra_args)


def _as_is(grads: Tree) -> Tree:
    return grads


def guard(
    inner: optax.GradientTransformation,
    *,
    on_nonfinite: str = "skip",
    loss_scale: DynamicLossScale | None = None,
    max_consecutive_skips: int | None = None,
) -> GuardedTransformation:
    """Runs `inner` on gradients that are finite, and on others leaves everything as it is.

    Each call is an attempt: undo the loss scale, look at every entry of the gradient
    (not at its norm, which can overflow for a gradient that is finite), run `inner`
    once or not at all, move the loss scale, count. A skip changes neither parameters
    nor the inner state, bit for bit: schedules, moments and averages do not advance.

    Put it outermost around what would be poisoned, and `MultiSteps` around it:
    `MultiSteps(guard(optax.adamw(1e-3)), 8)` decides once per group. `has_updated` and the
    counters of `MultiSteps` then know of the skips.

    `update` takes, besides the arguments of `inner`, `weight=` (a scalar: 0 says
    that nothing was supervised, which is a skip as well), and `microbatches=` (1 by
    default), `examples=`, `tokens=` (the weight by default) for the counters that
    `jax_accum.counts` reads.

    Args:
      inner: the optimizer to guard.
      on_nonfinite: `"skip"`; or `"apply"`, to pass a non-finite gradient on and count only.
      loss_scale: undone here, so that `inner` sees true gradients. Multiply the loss by
        `jax_accum.loss_scale(opt_state)`; `make_train_step` does it for you.
      max_consecutive_skips: after more non-finite attempts in a row than this the
        state is marked, and `jax_accum.check(opt_state)` raises. They are still skipped.

    Returns:
      An Optax transformation with extra arguments.

    Raises:
      ValueError: `on_nonfinite` unknown, or `max_consecutive_skips` below 1.
      TypeError: an argument of the wrong type.

    Example:
      >>> import jax.numpy as jnp, optax, jax_accum as ja
      >>> tx = ja.guard(optax.sgd(1.0))
      >>> params = jnp.ones(2)
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([1.0, jnp.inf]), state, params)
      >>> updates.tolist(), ja.counts(state)["skipped_nonfinite"]
      ([0.0, 0.0], 1)
    """
    if on_nonfinite not in ("skip", "apply"):
        raise ValueError(f"on_nonfinite must be 'skip' or 'apply', got {on_nonfinite!r}.")
    if loss_scale is not None and not isinstance(loss_scale, DynamicLossScale):
        raise TypeError(
            f"loss_scale must be a jax_accum.DynamicLossScale or None, got {loss_scale!r}."
        )
    if max_consecutive_skips is not None:
        checked_int(max_consecutive_skips, "max_consecutive_skips")
    inner = as_transformation(inner, "inner")

    def init(params: Tree) -> GuardState:
        return GuardState(
            inner_state=inner.init(params),
            counts=_counts.zero_counts(),
            consecutive_skips=jnp.zeros((), jnp.int32),
            exhausted=jnp.zeros((), bool),
            loss_scale=() if loss_scale is None else loss_scale.init(),
        )

    def attempt(
        sums: Tree,
        finish: Callable[[Tree], Tree],
        state: GuardState,
        params: Tree | None,
        *,
        in_place: bool = False,
        lends: bool = False,
        weight: Any = None,
        examples: Any = None,
        microbatches: Any = 1,
        tokens: Any = None,
        **extra_args: Any,
    ) -> tuple[Tree, GuardState]:
        if not hasattr(state, "consecutive_skips"):
            raise TypeError(
                f"state is a {type(state).__name__}, which this guard has not made: pass what "
                "init(params) of the guarded optimizer returned. A TrainState is to be created "
                "with the guarded optimizer, too."
            )
        w = jnp.ones(()) if weight is None else check_weight(weight)
        some = w != 0
        # What counts microbatches inside (an optimizer that accumulates) is told as well.
        told = {"weight": weight, "examples": examples, "tokens": tokens}
        extra_args |= {name: value for name, value in told.items() if value is not None}

        def inner_update(grads: Tree, inner_state: Any, params: Tree | None) -> tuple[Tree, Any]:
            return inner.update(grads, inner_state, params, **extra_args)

        grads = finish(sums)
        alone, _ = jax.eval_shape(inner_update, grads, state.inner_state, params)
        finite = accumulator.all_finite(grads) & ~jnp.isnan(w)
        # Shards of one gradient on several devices: one not finite, none is.
        if axes := tuple(_replicas.varying_axes(finite)):
            finite = jax.lax.pmin(finite.astype(jnp.int32), axes) != 0

        def run(sums: Tree, params: Tree | None, inner_state: Any) -> tuple[Tree, Any]:
            grads = finish(sums)
            if loss_scale is not None:
                grads = _unscaled(grads, state.loss_scale.scale)
            new, new_state = inner_update(grads, inner_state, params)
            if in_place:
                new = optax.apply_updates(params, new)
            else:
                new = jax.tree.map(accumulator.as_dtype_of, new, sums if lends else alone)
            return new, jax.tree.map(accumulator.as_dtype_of, new_state, inner_state)

        def hold(sums: Tree, params: Tree | None, inner_state: Any) -> tuple[Tree, Any]:
            if in_place:
                return params, inner_state
            return sums if lends else jax.tree.map(jnp.zeros_like, alone), inner_state

        runs = some & finite if on_nonfinite == "skip" else some
        # The branch that changes nothing is the one for false, or XLA copies the state.
        out, inner_state = jax.lax.cond(runs, run, hold, sums, params, state.inner_state)

        came_to = _counts.Outcome(runs, some & ~runs, ~some)
        seen = _counts.seen_in(microbatches, examples, weight if tokens is None else tokens)
        skips = jnp.where(
            some,
            jnp.where(finite, 0, optax.safe_increment(state.consecutive_skips)),
            state.consecutive_skips,
        )
        exhausted = state.exhausted
        if max_consecutive_skips is not None:
            exhausted |= skips > max_consecutive_skips
        scale = state.loss_scale
        if loss_scale is not None:
            moved = loss_scale.after(scale, finite)
            scale = jax.tree.map(lambda new, old: jnp.where(some, new, old), moved, scale)
        return out, GuardState(
            inner_state, _counts.closed(state.counts, seen, came_to), skips, exhausted, scale
        )

    def update(
        updates: Tree, state: GuardState, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, GuardState]:
        return attempt(updates, _as_is, state, params, **extra_args)

    guarded = GuardedTransformation(init, update)
    guarded.attempt = attempt
    return guarded


def _unscaled(grads: Tree, scale: jax.Array) -> Tree:
    """Gradients of the loss as it is; in float32 at least, where they do not vanish."""
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    return accumulator.scaled(wide, 1 / scale)


def check(opt_state: Any) -> None:
    """Raises on the host if a `guard` gave up: too many non-finite attempts in a row.

    Call it now and then, where metrics are read: it waits for the device.

    Args:
      opt_state: a state that holds, anywhere, that of a `guard`.

    Raises:
      FloatingPointError: with the counts.

    Example:
      >>> import jax.numpy as jnp, optax, jax_accum as ja
      >>> tx = ja.guard(optax.sgd(1.0), max_consecutive_skips=1)
      >>> state = tx.init(jnp.ones(1))
      >>> for _ in range(2):
      ...     _, state = tx.update(jnp.array([jnp.nan]), state)
      >>> ja.check(state)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
          ...
      FloatingPointError: 2 attempts in a row had a gradient that is not finite...
    """
    is_one = lambda node: isinstance(node, GuardState)  # noqa: E731
    nodes = [n for n in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(n)]
    for node in nodes:
        if jnp.any(node.exhausted):
            raise FloatingPointError(
                f"{int(jnp.max(node.consecutive_skips))} attempts in a row had a gradient that is "
                "not finite, more than max_consecutive_skips allows. The parameters are those of "
                f"the last good update. Counts: {_counts.counts(opt_state)}. Usual causes: a "
                "learning rate too high, a loss with log or division by zero, float16 without "
                "a loss scale."
            )

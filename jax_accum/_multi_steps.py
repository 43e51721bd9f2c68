"""MultiSteps: a group of microbatches accumulated across calls, in place of `optax.MultiSteps`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_accum import _accumulator as accumulator
from jax_accum import _counts, _replicas
from jax_accum._checks import as_transformation, checked_int, checked_schedule
from jax_accum._guard import GuardedTransformation
from jax_accum._multi_steps_call import Finish, Microbatch, Rules, enter, leave
from jax_accum._multi_steps_state import LocalGroup, MultiStepsState, OpenGroup, specs

Tree = Any


class MultiSteps:
    r"""Accumulates gradients over calls and runs the wrapped optimizer once per group.

    Takes the place of `optax.MultiSteps`: the same constructor, methods and state
    fields. What it adds: weights, so that microbatches of differing token counts
    are not averaged as equals; the end of a stream (`flush`); an update in place
    (`apply`); and one reduction per update over replicas (`axis_name`).

    Over the calls :math:`a` of a group, with gradients :math:`g_a` of the mean
    loss and weights :math:`w_a`, the wrapped optimizer sees

    .. math:: \sum_a w_a \, g_a \Big/ \sum_a w_a

    once, in the dtype `result_type(gradient, parameter)`. Without weights each
    call weighs 1. A weight of 0 contributes nothing, whatever the gradient holds;
    a group whose whole weight is 0 is a skip: neither parameters nor inner state
    are touched.

    Args:
      opt: the wrapped optimizer. It runs once per group, not once per call.
      every_k_schedule: calls per group: an int of at least 1, or a function from
        the number of updates made (`gradient_step`) to it. A new value takes hold
        when a group begins. A state restored in mid-group under a smaller `k`
        ends its group with the next call.
      use_grad_mean: divide by the weight (default), or hand over the plain sum.
      should_skip_update_fn: `(updates, gradient_step, params) -> (skip, state)`,
        asked in every call, as in Optax. A rejected microbatch enters no group.
      accumulator_dtype: widens the accumulators. They are never narrower than
        float32 nor than the parameters, so a narrower dtype changes nothing.
      axis_name: name, or tuple of names, of the mapped axes (`jax.shard_map`,
        `jax.pmap`) over which the calls see different microbatches. Sums stay
        local; they are reduced once, where the group ends. Without it, gradients
        are taken to be global already, as in Optax.
      loss_reduction: `"mean"`: gradients are of a microbatch's mean loss, and
        multiplied by its weight. `"sum"`: of the summed loss, and not multiplied.
      compensated: keep a compensation term (Kahan), one more tree, and so an
        error that does not grow with the number of microbatches.

    Raises:
      TypeError: `every_k_schedule` is neither an integer nor callable, or
        `accumulator_dtype` not floating.
      ValueError: `every_k_schedule` below 1, an unknown `loss_reduction`, or
        `should_skip_update_fn` together with `axis_name`.

    Example:
      >>> import jax.numpy as jnp, optax, jax_accum as ja
      >>> opt = ja.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
      >>> params = {"w": jnp.zeros(1)}
      >>> state = opt.init(params)
      >>> for tokens, grad in ((512, 2.0), (1536, 4.0)):
      ...     params, state = opt.apply({"w": jnp.full(1, grad)}, state, params, weight=tokens)
      >>> float(params["w"][0])  # and not -3.0, the mean of the means
      -3.5
    """

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[jax.Array], Any],
        use_grad_mean: bool = True,
        should_skip_update_fn: Callable[..., tuple[Any, Any]] | None = None,
        accumulator_dtype: Any = None,
        *,
        axis_name: Any = None,
        loss_reduction: str = "mean",
        compensated: bool = False,
    ):
        self._opt = as_transformation(opt, "opt")
        constant_k, schedule = checked_schedule(every_k_schedule)
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}.")
        if should_skip_update_fn is not None and axis_name is not None:
            raise ValueError(
                "should_skip_update_fn sees the gradient of one replica only, so with axis_name "
                "replicas could disagree. Wrap the inner optimizer in jax_accum.guard, which "
                "decides on the gradient of the whole group."
            )
        self._rules = Rules(
            constant_k=constant_k,
            schedule=schedule,
            normalise=use_grad_mean,
            scale=loss_reduction == "mean",
            should_skip=should_skip_update_fn,
            floor=accumulator.floor_dtype(accumulator_dtype),
            axes=_replicas.axis_names(axis_name),
            compensated=compensated,
        )

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped optimizer."""
        return self._opt

    def init(self, params: Tree, *, replicas: int | None = None) -> MultiStepsState:
        """The initial state; its accumulators take the sharding of the parameters.

        Args:
          params: tree of arrays.
          replicas: only with `axis_name`, outside the mapped function: gives each
            of that many replicas accumulators of its own, by a leading axis that
            `state_specs` shards. Inside the mapped function leave it out.

        Raises:
          TypeError: a leaf of `params` is not an array.
          ValueError: `replicas` below 1, or without `axis_name`.
        """
        rules = self._rules
        accumulator.require_arrays(params, "params")
        if replicas is not None and checked_int(replicas, "replicas") and not rules.axes:
            raise ValueError(
                "replicas goes together with axis_name: without it gradients are global, and one "
                "accumulator serves all replicas."
            )
        gradient_step = jnp.zeros((), jnp.int32)
        skip_state: Any = ()
        if rules.should_skip is not None:
            nothing = accumulator.zeros_like(params)
            _, skip_state = rules.should_skip(nothing, gradient_step, params)

        def local(tree: Tree) -> Tree:
            if replicas is not None:
                return jax.tree.map(lambda x: jnp.zeros((replicas, *x.shape), x.dtype), tree)
            bound = bool(rules.axes) and _replicas.is_bound(rules.axes)
            return _replicas.as_varying(tree, rules.axes) if bound else tree

        def accumulators() -> Tree:
            return local(accumulator.zeros_like(params, floor=rules.floor))

        keeps = rules.constant_k != 1
        group = (LocalGroup if rules.axes else OpenGroup)(
            weight=local(jnp.zeros((), jnp.result_type(float))),
            seen=local(_counts.zero_seen()),
            k=rules.k(gradient_step),
        )
        return MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=gradient_step,
            inner_opt_state=accumulator.own_buffers(self._opt.init(params), params),
            acc_grads=accumulators() if keeps else (),
            skip_state=accumulator.own_buffers(skip_state, params, gradient_step),
            compensation=accumulators() if keeps and rules.compensated else (),
            group=group,
            counts=_counts.zero_counts(),
            updated=jnp.zeros((), bool),
        )

    def update(
        self,
        updates: Tree,
        state: MultiStepsState,
        params: Tree | None = None,
        *,
        weight: Any = None,
        examples: Any = None,
        flush: Any = False,
        microbatches: Any = 1,
        tokens: Any = None,
        **extra_args: Any,
    ) -> tuple[Tree, MultiStepsState]:
        """Adds a microbatch; returns the updates where its group ends, else zeros.

        Args:
          updates: gradients, a tree like the parameters; or `None` for no microbatch,
            to close an open group with `flush=True` after the last one.
          state: the state.
          params: the parameters, if the wrapped optimizer needs them.
          weight: scalar, at least 0: what this microbatch weighs, its supervised
            tokens as a rule. 1 if not given. A traced weight that is negative or not
            finite makes the gradient of its group NaN.
          examples: scalar: examples in this microbatch, for the counters only.
          flush: bool, or traced boolean scalar: end the group with this call, however
            many microbatches it has, and divide by their true weight. A group
            with nothing in it is not counted. The same on all replicas.
          microbatches: how many microbatches `updates` stands for, for the counters only.
          tokens: supervised tokens, for the counters only; `weight` if not given.
          **extra_args: for the wrapped optimizer; those of the ending call reach it.

        Returns:
          The updates, of the dtypes that the wrapped optimizer alone would give,
          and the new state.

        Raises:
          ValueError: a tree or shape does not match, a concrete weight is negative or not
            finite, or `axis_name` is not bound.
          TypeError: a gradient is of integer type, or wider than its accumulator; `flush`
            is not boolean.
        """
        batch = Microbatch(updates, weight, examples, flush, microbatches, tokens)
        call = enter(self._rules, batch, state, params)

        inner_update = partial(self._opt.update, **extra_args)

        def alone(grads: Tree, inner: Any, params: Tree | None) -> tuple[Tree, Any]:
            axes = self._rules.axes
            return inner_update(jax.lax.psum(grads, axes) if axes else grads, inner, params)

        like, _ = jax.eval_shape(alone, call.like, state.inner_opt_state, params)

        lends = not self._rules.axes and accumulator.can_hold(call.state.acc_grads, like)
        guarded = isinstance(self._opt, GuardedTransformation)

        def attempt(
            sums: Tree, finish: Finish, inner: Any, params: Tree | None
        ) -> tuple[Tree, Any]:
            if guarded:
                run = partial(self._opt.attempt, lends=lends, **extra_args)
                new, inner = run(sums, finish, inner, params)
            else:
                new, inner = inner_update(finish(sums), inner, params)
            return jax.tree.map(accumulator.as_dtype_of, new, sums if lends else like), inner

        def hold(sums: Tree, params: Tree | None) -> Tree:
            return sums if lends else jax.tree.map(jnp.zeros_like, like)

        given = (lambda tried, came_to: came_to.updated if guarded else tried) if lends else None
        new, state = leave(self._rules, call, attempt, hold, given)
        return jax.tree.map(accumulator.as_dtype_of, new, like), state

    def apply(
        self,
        grads: Tree,
        state: MultiStepsState,
        params: Tree,
        *,
        weight: Any = None,
        examples: Any = None,
        flush: Any = False,
        microbatches: Any = 1,
        tokens: Any = None,
        **extra_args: Any,
    ) -> tuple[Tree, MultiStepsState]:
        """Adds a microbatch; where its group ends, updates the parameters in place.

        What `update` and `optax.apply_updates` do together; a call between touches no
        parameter. With the arguments donated, it costs an in-place add. Donated
        arguments must stand in the order of the results:

            @partial(jax.jit, donate_argnums=(0, 1))
            def accumulate(params, state, grads, tokens):
                return opt.apply(grads, state, params, weight=tokens)

        Arguments and errors are those of `update`. The updates are added in the precision
        that the wrapped optimizer gives, and are not rounded to the gradient's dtype first.

        Returns:
          The parameters and the new state.
        """
        batch = Microbatch(grads, weight, examples, flush, microbatches, tokens)
        call = enter(self._rules, batch, state, params)

        def attempt(sums: Tree, finish: Finish, inner: Any, params: Tree) -> tuple[Tree, Any]:
            if isinstance(self._opt, GuardedTransformation):
                return self._opt.attempt(sums, finish, inner, params, in_place=True, **extra_args)
            updates, inner = self._opt.update(finish(sums), inner, params, **extra_args)
            return optax.apply_updates(params, updates), inner

        return leave(self._rules, call, attempt, lambda sums, params: params)

    def has_updated(self, state: Any) -> jax.Array:
        """Whether the very call that returned `state` changed the parameters; boolean scalar."""
        return jnp.asarray(state.updated)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """`init` and `update` as an Optax transformation that takes extra arguments."""
        return optax.GradientTransformationExtraArgs(init=self.init, update=self.update)

    def state_specs(self, state: MultiStepsState) -> MultiStepsState:
        """A `PartitionSpec` per leaf of a state made by `init(params, replicas=...)`.

        For `in_specs` and `out_specs` of `jax.shard_map`: the accumulators of each replica
        are its own, everything else is the same on all.
        """
        return specs(state, self._rules.axes)

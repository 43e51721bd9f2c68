"""The state of `MultiSteps`: what the open group has seen, and what closed ones came to."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_accum import _counts


class OpenGroup(NamedTuple):
    """What the group that is being accumulated has seen; meaningless while `mini_step` is 0.

    Attributes:
      weight: scalar, float32 (float64 in 64-bit mode). Sum of the weights.
      seen: counters of microbatches, examples and tokens, `[3]`.
      k: scalar, int32. The calls that make the group full, fixed when it began.
    """

    weight: jax.Array
    seen: _counts.Words
    k: jax.Array


class LocalGroup(OpenGroup):
    """An `OpenGroup` that holds what one replica has seen; it is reduced when it ends."""


class MultiStepsState(NamedTuple):
    """State of `MultiSteps`: arrays only, of the same structure and dtypes after every call.

    Attributes:
      mini_step: scalar, int32. Calls that entered the open group.
      gradient_step: scalar, int32. Updates made; stays at 2^31 - 1.
      inner_opt_state: state of the wrapped optimizer.
      acc_grads: sum over the open group, a tree like the parameters; `()` where `k` is always 1.
        Meaningless while `mini_step` is 0: it is reset when a group begins, not when it ends.
      skip_state: what `should_skip_update_fn` last returned.
      compensation: Kahan's term, a tree like `acc_grads`, or `()`.
      group: what the open group has seen.
      counts: what all closed groups came to.
      updated: scalar, bool. Whether the last call changed the parameters.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: Any
    acc_grads: Any
    skip_state: Any = ()
    compensation: Any = ()
    group: Any = ()
    counts: Any = ()
    updated: Any = ()

    def pending_counts(self) -> list[int]:
        """What the open group adds to `counts`, in the order of its rows."""
        if not np.any(self.mini_step):
            return [0] * len(_counts.NAMES)
        seen = _counts.to_ints(self.group.seen, local=isinstance(self.group, LocalGroup))
        return seen + [0] * (len(_counts.NAMES) - len(seen))


def is_empty(tree: Any) -> bool:
    """Whether `tree` is the `()` that stands for a part that is not kept."""
    return isinstance(tree, tuple) and tree == ()


def is_stacked(state: MultiStepsState) -> bool:
    """Whether the state has a leading axis over replicas, of length 1 in a mapped function."""
    return jnp.ndim(state.group.weight) == 1


def _over_own(state: MultiStepsState, f: Any) -> MultiStepsState:
    """Applies `f` to the leaves that each replica has of its own."""
    group = state.group
    return state._replace(
        acc_grads=jax.tree.map(f, state.acc_grads),
        compensation=jax.tree.map(f, state.compensation),
        group=jax.tree.map(f, group._replace(k=()))._replace(k=group.k),
    )


def unstacked(state: MultiStepsState) -> MultiStepsState:
    """A stacked state, as one replica sees it in the mapped function, without the leading axis.

    Raises:
      ValueError: the leading axis is not of length 1.
    """
    replicas = jnp.shape(state.group.weight)[0]
    if replicas != 1:
        raise ValueError(
            f"state holds the accumulators of {replicas} replicas where one is expected. Pass it "
            "into jax.shard_map with in_specs=opt.state_specs(state), one replica a device."
        )
    return _over_own(state, lambda x: x[0])


def stacked(state: MultiStepsState) -> MultiStepsState:
    """The inverse of `unstacked`."""
    return _over_own(state, lambda x: x[None])


def specs(state: MultiStepsState, axes: tuple[Any, ...]) -> MultiStepsState:
    """A `PartitionSpec` per leaf of a state whose accumulators have a leading axis over `axes`."""
    own, same = PartitionSpec(axes), PartitionSpec()

    def every(tree: Any, spec: Any) -> Any:
        return jax.tree.map(lambda _: spec, tree)

    return every(state, same)._replace(
        acc_grads=every(state.acc_grads, own),
        compensation=every(state.compensation, own),
        group=every(state.group, own)._replace(k=same),
    )

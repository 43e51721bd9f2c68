"""DynamicLossScale: the factor that keeps float16 gradients from vanishing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_accum._checks import checked_int

LARGEST = float(jnp.finfo(jnp.float32).max)
SMALLEST = float(jnp.finfo(jnp.float32).tiny)


class LossScaleState(NamedTuple):
    """State of a `DynamicLossScale`.

    Attributes:
      scale: scalar, float32. What the loss is to be multiplied by.
      clean_attempts: scalar, int32. Attempts in a row without an overflow, since the last growth.
    """

    scale: jax.Array
    clean_attempts: jax.Array


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """Loss scale that backs off on an overflow and grows after a while without one.

    It moves once per attempt and is constant inside a group. An attempt on a group
    without any weight tells nothing, and moves nothing.

    The rule is that of `torch.amp.GradScaler`:

    ================== =========================== ===========================
    here               `GradScaler`                its default, and ours
    ================== =========================== ===========================
    `initial`          `init_scale`                65536; ours 32768
    `factor`           `growth_factor`             2
    `1 / factor`       `backoff_factor`            0.5
    `growth_interval`  `growth_interval`           2000
    `maximum`          (none: grows while finite)  the largest float32
    `minimum`          (none: can reach 0)         the smallest normal float32
    ================== =========================== ===========================

    Args:
      initial: scale of the first group. A power of two costs no precision.
      growth_interval: attempts in a row without an overflow, after which the scale grows.
      factor: by which it grows, and is divided on an overflow; above 1.
      minimum: it never falls below.
      maximum: it never grows above: a growth that would is left out.

    Raises:
      ValueError: a value out of range.
      TypeError: `growth_interval` is not an integer.

    References:
      Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740.

    Example:
      >>> import jax_accum as ja
      >>> ja.DynamicLossScale(initial=8.0).initial
      8.0
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0
    minimum: float = SMALLEST
    maximum: float = LARGEST

    def __post_init__(self) -> None:
        checked_int(self.growth_interval, "growth_interval")
        if not 1 < self.factor < math.inf:
            raise ValueError(f"factor must be above 1 and finite, got {self.factor}.")
        if not 0 < self.minimum <= self.initial <= self.maximum <= LARGEST:
            raise ValueError(
                "want 0 < minimum <= initial <= maximum <= the largest float32, got "
                f"minimum={self.minimum}, initial={self.initial}, maximum={self.maximum}."
            )

    def init(self) -> LossScaleState:
        """The state before the first attempt."""
        return LossScaleState(jnp.asarray(self.initial, jnp.float32), jnp.zeros((), jnp.int32))

    def after(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after an attempt whose gradient was `finite` (boolean scalar) or not."""
        clean = state.clean_attempts + 1
        due = clean >= self.growth_interval
        # Compared before multiplying: the product may not be a number of its own.
        grows = due & (state.scale <= self.maximum / self.factor)
        grown = jnp.where(grows, state.scale * self.factor, state.scale)
        backed_off = jnp.maximum(state.scale / self.factor, self.minimum)
        return LossScaleState(
            jnp.where(finite, grown, backed_off).astype(jnp.float32),
            jnp.where(finite & ~due, clean, 0).astype(jnp.int32),
        )


def find_scales(opt_state: Any) -> list[jax.Array]:
    """The loss scales in an optimizer state, in order."""
    is_one = lambda node: isinstance(node, LossScaleState)  # noqa: E731
    return [node.scale for node in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(node)]


def loss_scale(opt_state: Any) -> jax.Array:
    """The scale to multiply the loss of every microbatch of the present group by.

    Args:
      opt_state: a state that holds, anywhere, that of a `guard` with a loss scale.

    Returns:
      Scalar, float32.

    Raises:
      ValueError: no loss scale in `opt_state`, or more than one.

    Example:
      >>> import jax.numpy as jnp, optax, jax_accum as ja
      >>> tx = optax.chain(ja.guard(optax.sgd(0.1), loss_scale=ja.DynamicLossScale(8.0)))
      >>> float(ja.loss_scale(tx.init(jnp.ones(2))))
      8.0
    """
    scales = find_scales(opt_state)
    if len(scales) != 1:
        raise ValueError(
            f"opt_state holds {len(scales)} loss scales where one is expected. Wrap the optimizer "
            "in jax_accum.guard(..., loss_scale=jax_accum.DynamicLossScale()), once."
        )
    return scales[0]

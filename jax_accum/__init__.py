"""Gradient accumulation for JAX, normalised by what was really supervised."""

from jax_accum import losses
from jax_accum._counts import Counts, counts
from jax_accum._guard import GuardState, check, guard
from jax_accum._loss_scale import DynamicLossScale, LossScaleState, loss_scale
from jax_accum._multi_steps import MultiSteps
from jax_accum._multi_steps_state import MultiStepsState
from jax_accum._weighted import Weighted

__version__ = "0.1.0"

__all__ = [
    "Counts",
    "DynamicLossScale",
    "GuardState",
    "LossScaleState",
    "MultiSteps",
    "MultiStepsState",
    "Weighted",
    "__version__",
    "check",
    "counts",
    "guard",
    "loss_scale",
    "losses",
]

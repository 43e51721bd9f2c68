"""Gradient accumulation for JAX, normalised by what was really supervised."""

from jax_accum import losses
from jax_accum._counts import Counts, counts
from jax_accum._group_grad import GroupInfo, accumulated_value_and_grad
from jax_accum._guard import GuardState, check, guard
from jax_accum._layout import data_replicas
from jax_accum._loss_scale import DynamicLossScale, LossScaleState, loss_scale
from jax_accum._multi_steps import MultiSteps
from jax_accum._multi_steps_state import MultiStepsState
from jax_accum._plan import BatchPlan
from jax_accum._split import microbatch_rows
from jax_accum._train_step import make_train_step
from jax_accum._weighted import Weighted

__version__ = "0.1.0"

__all__ = [
    "BatchPlan",
    "Counts",
    "DynamicLossScale",
    "GroupInfo",
    "GuardState",
    "LossScaleState",
    "MultiSteps",
    "MultiStepsState",
    "Weighted",
    "__version__",
    "accumulated_value_and_grad",
    "check",
    "counts",
    "data_replicas",
    "guard",
    "loss_scale",
    "losses",
    "make_train_step",
    "microbatch_rows",
]

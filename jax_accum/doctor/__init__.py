"""The doctor: names the accumulation fault in somebody's training step."""

from jax_accum.doctor._case import Case, UnusableStepError
from jax_accum.doctor._diagnose import diagnose
from jax_accum.doctor._diagnosis import Diagnosis
from jax_accum.doctor._recipe import Recipe

__all__ = ["Case", "Diagnosis", "Recipe", "UnusableStepError", "diagnose"]

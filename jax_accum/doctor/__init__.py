"""The doctor: names the accumulation fault in somebody's training step."""

from jax_accum.doctor._case import Case, UnusableStepError
from jax_accum.doctor._diagnose import diagnose
from jax_accum.doctor._diagnosis import Diagnosis
from jax_accum.doctor._memory import Growth, memory_growth
from jax_accum.doctor._preflight import Line, Preflight, preflight
from jax_accum.doctor._recipe import Recipe
from jax_accum.doctor._symptoms import SYMPTOMS, Symptom, describe

__all__ = [
    "SYMPTOMS",
    "Case",
    "Diagnosis",
    "Growth",
    "Line",
    "Preflight",
    "Recipe",
    "Symptom",
    "UnusableStepError",
    "describe",
    "diagnose",
    "memory_growth",
    "preflight",
]

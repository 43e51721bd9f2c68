"""Memory of a training step: what it needs before it runs, and the largest microbatch that fits."""

from jax_accum.memory._analyze import Analysis, Part, analyze
from jax_accum.memory._budget import as_bytes, readable
from jax_accum.memory._errors import DoesNotFitError, is_exhausted
from jax_accum.memory._fitting import FittingStep, fitting_step
from jax_accum.memory._line import Line
from jax_accum.memory._live import Measured, Usage, measure
from jax_accum.memory._regroup import regroup
from jax_accum.memory._rehearse import rehearse
from jax_accum.memory._search import Row, Search, largest_microbatch

__all__ = [
    "Analysis",
    "DoesNotFitError",
    "FittingStep",
    "Line",
    "Measured",
    "Part",
    "Row",
    "Search",
    "Usage",
    "analyze",
    "as_bytes",
    "fitting_step",
    "is_exhausted",
    "largest_microbatch",
    "measure",
    "readable",
    "regroup",
    "rehearse",
]

"""What one training run showed, on either side: the quantities that are compared."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jax_accum.crosscheck.data import Group
from jax_accum.crosscheck.maps import Arrays

COUNTERS = (
    "microbatches",
    "examples",
    "tokens",
    "attempts",
    "updates",
    "skipped_nonfinite",
    "skipped_empty",
)


@dataclass
class Trace:
    """A run of several updates, in NumPy and under the JAX paths, whichever side it ran on.

    Args:
      losses: loss of each group, before its update.
      norms: norm of each group's gradient before clipping, as the side itself reports it.
      gradient: of the first group, by JAX path, as the inner optimizer was given it.
      parameters: after each update, by JAX path.
      counters: totals at the end, by the names of `COUNTERS`.
      scales: loss scale of each attempt, where there is one.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradient: Arrays = field(default_factory=dict)
    parameters: list[Arrays] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)

    def add(self, loss: float, norm: float, gradient: Arrays, parameters: Arrays) -> None:
        """Appends one update; the first brings the gradient that is kept whole."""
        if not self.losses:
            self.gradient = gradient
        self.losses.append(float(loss))
        self.norms.append(float(norm))
        self.parameters.append(parameters)


def tree_norm(arrays: Arrays) -> float:
    """L2 norm over all arrays, summed in float64.

    >>> tree_norm({"a": np.array([3.0]), "b": np.array([4.0])})
    5.0
    """
    squares = [np.sum(np.square(a, dtype=np.float64)) for a in arrays.values()]
    return float(np.sqrt(np.sum(squares)))


def expected_counters(groups: list[Group], microbatch_size: int) -> dict[str, int]:
    """The counters that both sides must show, counted from the examples alone."""
    return {
        "microbatches": sum(-(-len(g.examples) // microbatch_size) for g in groups),
        "examples": sum(len(g.examples) for g in groups),
        "tokens": sum(g.tokens for g in groups),
        "attempts": len(groups),
        "updates": len(groups),
        "skipped_nonfinite": 0,
        "skipped_empty": 0,
    }

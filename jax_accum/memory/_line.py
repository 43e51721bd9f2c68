"""A line of memory against microbatch size: what is fixed, and what each example adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Line(NamedTuple):
    """`fixed + per_example * m` bytes."""

    fixed: float
    per_example: float

    def __call__(self, m: int) -> int:
        """Predicted bytes at microbatch size m."""
        return round(self.fixed + self.per_example * m)


def fit(peaks: Mapping[int, int], fixed: int) -> Line:
    """The line with the least squared relative error through known peaks.

    Args:
      peaks: bytes by microbatch size, at least one.
      fixed: bytes that do not depend on m, to go by where one point alone is known.

    Example:
      >>> fit({1: 110, 4: 140}, 0)(8)
      180
    """
    if len(peaks) == 1:
        ((m, peak),) = peaks.items()
        return Line(fixed, max(peak - fixed, 0) / m)
    # Weighted least squares with weights 1 / peak²: a small peak counts as much as a large one.
    weights = {m: 1.0 / max(peak, 1) ** 2 for m, peak in peaks.items()}
    total = sum(weights.values())
    mean_m = sum(w * m for m, w in weights.items()) / total
    mean_peak = sum(w * peaks[m] for m, w in weights.items()) / total
    spread = sum(w * (m - mean_m) ** 2 for m, w in weights.items())
    slope = sum(w * (m - mean_m) * (peaks[m] - mean_peak) for m, w in weights.items()) / spread
    # Memory does not shrink with m; a compiler's whims between two sizes may look like it.
    slope = max(slope, 0.0)
    return Line(mean_peak - slope * mean_m, slope)

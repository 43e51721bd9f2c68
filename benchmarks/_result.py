"""What a benchmark finds: figures with their spread, claims held against them, tables and plots."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

HOLDS, NOISE, FAILS = "holds", "within the noise", "does not"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
      key: what it is, unique in its benchmark; parts separated by `/`.
      value: the median over the rounds, or the exact number.
      low: lower quartile.
      high: upper quartile.
      unit: `x` for a ratio within one run, else a unit.
      exact: read from the compiled program or counted: the same in every run.
      better: `lower` or `higher`.
      median_low: with `median_high`, where the median lies for all that so many rounds can tell;
        `None` where they are too few to tell.
      median_high: see there.
    """

    key: str
    value: float
    low: float
    high: float
    unit: str = "x"
    exact: bool = False
    better: str = "lower"
    median_low: float | None = None
    median_high: float | None = None

    def __str__(self) -> str:
        """The value, with its quartiles where it was measured."""
        if self.exact or self.low == self.high:
            return show(self.value)
        return f"{show(self.value)} ({show(self.low)} to {show(self.high)})"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A line that ours must reach: `key`'s figure against a limit.

    Attributes:
      text: the claim in words.
      key: the figure that decides it.
      limit: what it must not pass.
      at_most: whether the limit is an upper one.
      why: what explains a figure beyond the limit.
    """

    text: str
    key: str
    limit: float
    at_most: bool = True
    why: str = ""

    def verdict(self, figure: Figure) -> str:
        """`HOLDS` if the median keeps to the limit, `NOISE` if it may for all one can tell.

        That is where the interval of the median reaches the limit; of few rounds, where the better
        quartile does.
        """
        if self._keeps(figure.value):
            return HOLDS
        better = figure.median_low if self.at_most else figure.median_high
        if better is None:
            better = figure.low if self.at_most else figure.high
        return NOISE if self._keeps(better) else FAILS

    def _keeps(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under columns; cells are text, numbers or figures."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Plot:
    """Lines through points; `series` maps a name to points `(x, y)`."""

    title: str
    x: str
    y: str
    series: dict[str, list[tuple[float, float]]]
    log_x: bool = True
    log_y: bool = False


@dataclasses.dataclass
class Result:
    """All that one benchmark found."""

    name: str
    question: str
    figures: list[Figure] = dataclasses.field(default_factory=list)
    claims: list[Claim] = dataclasses.field(default_factory=list)
    tables: list[Table] = dataclasses.field(default_factory=list)
    plots: list[Plot] = dataclasses.field(default_factory=list)
    configuration: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, *figures: Figure) -> Figure:
        """Takes figures in; returns the first."""
        self.figures += figures
        return figures[0]

    def exact(self, key: str, value: float, unit: str = "", better: str = "lower") -> Figure:
        """Takes in an exact number."""
        return self.add(Figure(key, value, value, value, unit, True, better))

    def figure(self, key: str) -> Figure:
        """The figure of a key."""
        return next(f for f in self.figures if f.key == key)

    def verdicts(self) -> list[tuple[Claim, Figure, str]]:
        """Each claim with its figure and the verdict, where the figure was measured."""
        keys = {f.key for f in self.figures}
        found = [(claim, self.figure(claim.key)) for claim in self.claims if claim.key in keys]
        return [(claim, figure, claim.verdict(figure)) for claim, figure in found]


def show(x: float) -> str:
    """A number with three figures that matter."""
    if isinstance(x, int) or (math.isfinite(x) and x == int(x) and abs(x) < 1e6):
        return f"{int(x):,}"
    if x and (abs(x) < 1e-3 or abs(x) >= 1e6):
        return f"{x:.2e}"
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"

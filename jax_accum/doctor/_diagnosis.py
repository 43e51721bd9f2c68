"""Diagnosis: the doctor's answer, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
      status: "right", "fault", or "unknown": something is wrong, and it is nothing known.
      fault: its name; None if there is none, or none that is known.
      summary: one sentence.
      evidence: observed, expected and predicted numbers.
      reasoning: lines that lead from the numbers to the answer.
      change: what to change.
      also: a second, smaller fault at the same time, or None.
      tolerance: the largest relative deviation that rounding errors explain here.
      not_told_apart: faults that these runs would not show, or not beside what was found.
      not_examined: what was left out, and why.
      calls: how often the step was called.
      seconds: how long it all took, compilation included.
    """

    status: str
    fault: str | None
    summary: str
    evidence: dict[str, Any]
    reasoning: list[str]
    change: str
    tolerance: float
    also: str | None = None
    not_told_apart: list[str] = dataclasses.field(default_factory=list)
    not_examined: list[str] = dataclasses.field(default_factory=list)
    calls: int = 0
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether nothing was found."""
        return self.status == "right"

    def to_json(self) -> str:
        """Everything, as a JSON object."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=2, allow_nan=False)

    def __str__(self) -> str:
        lines = [self.summary, ""]
        lines += [f"  {name}: {_shown(value)}" for name, value in self.evidence.items()]
        if self.reasoning:
            lines += ["", "Why:", *(f"  {i}. {x}" for i, x in enumerate(self.reasoning, 1))]
        if self.change:
            lines += ["", f"What to change: {self.change}"]
        if self.also:
            lines += ["", f"A second, smaller fault is there as well: {self.also}."]
        if self.not_told_apart:
            lines += ["", f"Not told apart by this case: {', '.join(self.not_told_apart)}."]
        if self.not_examined:
            lines += ["", f"Not examined: {'; '.join(self.not_examined)}."]
        if self.seconds:
            lines += ["", f"It took {self.seconds:.1f} s and {self.calls} calls of the step."]
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    """For JSON: no NaN, no infinity, no NumPy."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return str(value)
    return value


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_shown(v) for v in value)
    return str(value)

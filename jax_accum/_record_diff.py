"""What makes the loss curves of two runs incomparable, the axis first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference between two records.

    Attributes:
      field: which.
      a: its value in the first.
      b: its value in the second.
      curves: whether it makes the loss curves incomparable.
      why: what it means, in a sentence.
    """

    field: str
    a: Any
    b: Any
    curves: bool
    why: str

    def __str__(self) -> str:
        return f"{self.field}: {self.a} and {self.b}. {self.why}"


_FIELDS = [
    ("schedule_unit", "Schedules advance with different units: learning rates differ."),
    ("normalisation", "The losses are divided by different things: values and gradients differ."),
    ("last_group.policy", "Short groups are treated differently: not the same examples train."),
    ("optimizer", "Another optimizer or other hyperparameters."),
    ("data", "Other examples, or another order."),
    ("seed", "Other initial weights or randomness."),
    ("precision.params", "Parameters have another precision."),
    ("precision.compute", "Computation has another precision."),
    ("precision.accumulator", "The accumulator has another precision."),
]
_CONTEXT = [
    ("plan.microbatch_size", "The examples per update decide, not how they are cut."),
    ("plan.microbatches", "The examples per update decide, not how they are cut."),
    ("plan.replicas", "The examples per update decide, not how they are cut."),
    ("mesh", "Where the same arithmetic runs."),
    ("processes", "Where the same arithmetic runs."),
    ("environment.versions", "Rounding may differ."),
    ("environment.devices", "Rounding may differ."),
]


def differences(a: Record, b: Record) -> list[Difference]:
    """All differences that matter to a loss curve, the axis first, and then its context.

    Memory, times, and what was done before the run counted do not matter to it.
    """
    found = _axis(a, b) + _plan_changes(a, b)
    for field, why in _FIELDS:
        if _at(a, field) != _at(b, field):
            found.append(Difference(field, _at(a, field), _at(b, field), True, why))
    found += _loss_scale(a, b) + _skips(a, b)
    for field, why in _CONTEXT:
        if _at(a, field) != _at(b, field):
            found.append(Difference(field, _at(a, field), _at(b, field), False, why))
    return found


def _axis(a: Record, b: Record) -> list[Difference]:
    found = []
    sizes = [_at(r, "plan.examples_per_update") for r in (a, b)]
    if sizes[0] != sizes[1]:
        found.append(
            Difference(
                "plan.examples_per_update",
                sizes[0],
                sizes[1],
                True,
                "Updates per example differ: an update is not the same axis in both. Plot "
                "against examples or tokens.",
            )
        )
    tokens = [_at(r, "counts.tokens") for r in (a, b)]
    if _at(a, "counts.examples") == _at(b, "counts.examples") and tokens[0] != tokens[1]:
        why = "In as many examples not as many tokens are supervised: plot against tokens."
        found.append(Difference("counts.tokens", tokens[0], tokens[1], True, why))
    return found


def _plan_changes(a: Record, b: Record) -> list[Difference]:
    changes = [
        [
            (c["examples"], c["before"]["examples_per_update"], c["after"]["examples_per_update"])
            for c in r["plan_changes"]
            if c["before"]["examples_per_update"] != c["after"]["examples_per_update"]
        ]
        for r in (a, b)
    ]
    if changes[0] == changes[1]:
        return []
    why = "The examples per update changed on the way: (at examples, before, after)."
    return [Difference("plan_changes", changes[0], changes[1], True, why)]


def _loss_scale(a: Record, b: Record) -> list[Difference]:
    shared = min(r["counts"]["attempts"] for r in (a, b))  # one may have run on
    histories = [
        [(s["attempts"], s["scale"]) for s in r["loss_scale"] if s["attempts"] <= shared]
        for r in (a, b)
    ]
    if histories[0] == histories[1]:
        return []
    why = "The loss scale took another course: (from attempt, scale)."
    return [Difference("loss_scale", histories[0], histories[1], True, why)]


def _skips(a: Record, b: Record) -> list[Difference]:
    found = []
    for name in ("skipped_nonfinite", "skipped_empty", "examples_dropped"):
        counts = [r["counts"][name] for r in (a, b)]
        if counts[0] != counts[1]:
            what = (
                "Examples were dropped" if name == "examples_dropped" else "Attempts were skipped"
            )
            why = f"{what} that the other run trained."
            found.append(Difference(f"counts.{name}", counts[0], counts[1], True, why))
    return found


def _at(record: Record, field: str) -> Any:
    value: Any = record
    for name in field.split("."):
        value = value[name]
    return value

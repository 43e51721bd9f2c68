"""Answers: puts what was found into words and numbers that a person can check."""

from __future__ import annotations

import dataclasses

from jax_accum.doctor import _faults as faults
from jax_accum.doctor import _names as known
from jax_accum.doctor._advice import ADVICE
from jax_accum.doctor._candidate import Candidate
from jax_accum.doctor._diagnosis import Diagnosis
from jax_accum.doctor._evidence import (
    coefficients,
    leaked_in,
    numbers,
    quantity_of,
    telling,
    tolerance_of,
)
from jax_accum.doctor._predict import Run
from jax_accum.doctor._runs import Subject
from jax_accum.doctor._score import Judge


@dataclasses.dataclass(frozen=True)
class Findings:
    """What explains the runs.

    Attributes:
      name: the fault, or None where several fit, or none.
      names: all that fit.
      candidates: in all their ways.
      also: of two at once, the smaller.
    """

    name: str | None
    names: list[str]
    candidates: list[Candidate]
    also: str | None = None


def answer_fault(found: Findings, judge: Judge, runs: list[Run], subject: Subject) -> Diagnosis:
    """The answer where one fault explains everything."""
    assert found.name is not None
    best = found.candidates[0]
    run = telling(judge, runs)
    singles = faults.candidates(
        judge.case, gradient_only=subject.gradient_only, terms=judge.oracle.terms()
    )
    fits = [judge.fit(c, run) for c in singles if c.name not in (found.name, *found.names)]
    nearest = min(fits, key=lambda f: f.score)
    own, right = judge.fit(best, run), judge.fit(Candidate(), run)
    evidence = numbers(judge, run, best, right)
    evidence["fits to"] = own.deviation
    evidence["next candidate"] = f"{nearest.candidate.name} ({nearest.deviation:.3g} off)"
    evidence["times better than the next"] = _ratio(nearest.deviation, own.deviation)
    way = best.way
    what, change = ADVICE[found.name]
    reasoning = [
        f"In the probe “{run.name}”, group {right.group + 1}, the {quantity_of(right, run)} is "
        f"{right.deviation:.3g} (relative) away from the right one; rounding explains "
        f"{tolerance_of(judge, run, right.quantity):.2g}.",
        f"If the fault is “{best.name}” ({way}), that is what had to come out: it agrees to "
        f"{own.deviation:.2g} over all groups.",
        f"The next best candidate, “{nearest.candidate.name}”, is {nearest.deviation:.3g} off.",
    ]
    if shares := coefficients(judge, run, right.group):
        evidence["share of each microbatch, 1 is right"] = shares
    if found.name == known.LEAK:
        leaked = leaked_in(best, run, right.group)
        evidence["examples of earlier groups in it"] = leaked
        reasoning.append(
            f"Group {right.group + 1} holds gradients of the examples {leaked} of earlier groups."
        )
    return Diagnosis(
        status="fault",
        fault=found.name,
        summary=f"Fault: {found.name}. {what}",
        evidence=evidence,
        reasoning=reasoning,
        change=change,
        also=found.also,
        tolerance=tolerance_of(judge, run, right.quantity),
        not_examined=left_out(subject),
        calls=subject.calls,
    )


def answer_right(judge: Judge, runs: list[Run], subject: Subject, alike: list[str]) -> Diagnosis:
    """The clean bill, and how far it goes."""
    worst = max((judge.fit(Candidate(), run) for run in runs), key=lambda f: f.score)
    tolerance = max(tolerance_of(judge, run) for run in runs)
    seen = [name for name in alike if not _needs_probe(name, runs)]
    return Diagnosis(
        status="right",
        fault=None,
        summary=f"Right: every group did what the undivided batch would have done, to within "
        f"{tolerance:.2g} (relative).",
        evidence={
            "largest deviation": worst.deviation,
            "tolerance": tolerance,
            "probes": [run.name for run in runs],
        },
        reasoning=[
            f"{sum(len(run.groups) for run in runs)} groups in {len(runs)} runs, each held against "
            "sums and weights in float64.",
            f"The tolerance is {tolerance:.2g}: the gradient of the loss itself is that noisy in "
            "this dtype, and the parameters are rounded to it.",
        ],
        change="",
        tolerance=tolerance,
        not_told_apart=seen,
        not_examined=left_out(subject),
        calls=subject.calls,
    )


def answer_batch(apart: float, judge: Judge, runs: list[Run], subject: Subject) -> Diagnosis:
    """The answer where the loss is not a sum over examples."""
    what, change = ADVICE[known.BATCH_STATISTICS]
    return Diagnosis(
        status="fault",
        fault=known.BATCH_STATISTICS,
        summary=f"Fault: {known.BATCH_STATISTICS}. {what}",
        evidence={"gradient of a microbatch against the sum over its examples": apart},
        reasoning=[
            "The step does with its microbatches what is right.",
            f"But the gradient of a microbatch is {apart:.3g} (relative) away from the sum of the "
            "gradients of its examples, so that it depends on which examples stand together.",
        ],
        change=change,
        tolerance=max(tolerance_of(judge, run) for run in runs),
        not_examined=left_out(subject),
        calls=subject.calls,
    )


def unknown(
    judge: Judge,
    runs: list[Run],
    subject: Subject,
    singles: list[Candidate],
    several: list[str] | None = None,
) -> Diagnosis:
    """The answer where no name can be given."""
    run = telling(judge, runs)
    right = judge.fit(Candidate(), run)
    nearest = min((judge.fit(c, run) for c in singles[1:]), key=lambda f: f.score)
    evidence = numbers(judge, run, nearest.candidate, right)
    evidence["nearest candidate"] = f"{nearest.candidate.name} ({nearest.deviation:.3g} off)"
    if shares := coefficients(judge, run, right.group):
        evidence["share of each microbatch, 1 is right"] = shares
    undivided = len(run.groups) == 1 and not several
    if several:
        summary = f"Something is wrong, and several faults explain it: {', '.join(several)}."
        change = "give examples with more different token counts, or a step with plain SGD."
    elif undivided:
        summary = (
            "The step disagrees with the case even where nothing is accumulated: on one microbatch "
            f"alone its {quantity_of(right, run)} is {right.deviation:.3g} (relative) away."
        )
        change = (
            "compare loss_fn (or sums) with the step's own loss, and recipe with its optimizer, "
            "before looking at accumulation."
        )
    else:
        summary = (
            f"Unknown fault: the {quantity_of(right, run)} is {right.deviation:.3g} (relative) "
            "away from the right one, and no known fault explains it."
        )
        change = "the shares of the microbatches below, and a run with plain SGD, narrow it down."
    return Diagnosis(
        status="unknown",
        fault=None,
        summary=summary,
        evidence=evidence,
        reasoning=[
            f"Probe “{run.name}”, group {right.group + 1}: {right.score:.3g} times what rounding "
            "explains.",
            f"The nearest candidate, “{nearest.candidate.name}”, is {nearest.score:.3g} times the "
            "tolerance off, too far for a name."
            if not several
            else "Further cuts of the examples did not tell them apart.",
        ],
        change=change,
        tolerance=tolerance_of(judge, run, right.quantity),
        not_told_apart=several or [],
        not_examined=left_out(subject),
        calls=subject.calls,
    )


def left_out(subject: Subject) -> list[str]:
    """What this case does not allow to look at."""
    case, found = subject.case, []
    if subject.gradient_only:
        found.append("the optimizer (only gradients were given)")
    if case.labels is None:
        found.append("ignored labels and shifts (Case.labels is not given)")
    for probe in ("ragged", "ignored", "empty", "nonfinite"):
        if probe not in case.examined and not (
            case.labels is None and probe in ("ignored", "empty")
        ):
            found.append(f"the probe “{probe}” (not asked for, or not possible)")
    if case.replicas == 1:
        found.append("replicas (Case.replicas is 1)")
    return found


def _ratio(other: float, own: float) -> float:
    return other / own if own else float("inf")


def _needs_probe(name: str, runs: list[Run]) -> bool:
    """Whether a fault could not show because its probe was not run."""
    probes = {run.name for run in runs}
    needs = {
        known.PARTIAL_BY_FULL: {"a partial group"},
        known.PARTIAL_DROPPED: {"a partial group"},
        known.PARTIAL_CARRIED: {"a partial group"},
        known.POISONED: {"a group with an inf"},
        known.NAN_IGNORED: {"an all-ignored microbatch", "a group without supervision"},
    }
    return name in needs and not needs[name] & probes

"""Answers: puts what was found into words and numbers that a person can check."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_accum.doctor import _faults as faults
from jax_accum.doctor import _names as known
from jax_accum.doctor._advice import ADVICE
from jax_accum.doctor._candidate import Candidate, Settings, shares_of
from jax_accum.doctor._diagnosis import Diagnosis
from jax_accum.doctor._predict import Run, predict
from jax_accum.doctor._runs import Subject
from jax_accum.doctor._score import Fit, Judge
from jax_accum.doctor._vectors import norm


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
    run = _telling(judge, runs)
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
        f"In the probe “{run.name}”, group {right.group + 1}, the {_quantity(right, run)} is "
        f"{right.deviation:.3g} (relative) away from the right one; rounding explains "
        f"{tolerance_of(judge, run, right.quantity):.2g}.",
        f"If the fault is “{best.name}” ({way}), that is what had to come out: it agrees to "
        f"{own.deviation:.2g} over all groups.",
        f"The next best candidate, “{nearest.candidate.name}”, is {nearest.deviation:.3g} off.",
    ]
    if shares := coefficients(judge, run, right.group):
        evidence["share of each microbatch, 1 is right"] = shares
    if found.name == known.LEAK:
        leaked = _leaked(best, run, right.group)
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
    run = _telling(judge, runs)
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
            f"alone its {_quantity(right, run)} is {right.deviation:.3g} (relative) away."
        )
        change = (
            "compare loss_fn (or sums) with the step's own loss, and recipe with its optimizer, "
            "before looking at accumulation."
        )
    else:
        summary = (
            f"Unknown fault: the {_quantity(right, run)} is {right.deviation:.3g} (relative) away "
            "from the right one, and no known fault explains it."
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


def numbers(judge: Judge, run: Run, candidate: Candidate, right: Fit) -> dict[str, Any]:
    """Sizes of what was observed, expected and predicted, in the group that tells most."""
    place, name = right.group, right.quantity
    until = place + 1

    def of(seen: Any) -> float:
        vector = seen.change if name == "change" else seen.visible[name]
        return norm(vector)

    def predicted(c: Candidate) -> float:
        return of(predict(c, run, judge.case, judge.oracle, until=until)[place])

    return {
        "probe": run.name,
        "group": place + 1,
        "quantity": f"norm of the {_quantity(right, run)}",
        "observed": of(run.seen[place]),
        "expected": predicted(Candidate()),
        "the fault predicts": predicted(candidate),
        "deviation from right": right.deviation,
    }


def coefficients(judge: Judge, run: Run, place: int) -> list[float]:
    """With what factor each microbatch of a group is in the gradient, where it can be solved for.

    The least-squares solution of observed gradient = sum of factor times right share; earlier
    groups' come first. Empty if the gradient cannot be seen, or is no such sum.
    """
    case, oracle = judge.case, judge.oracle
    if not (run.gradient_only or case.recipe.plain):
        return []
    gradient = run.seen[place].change
    if not run.gradient_only:
        gradient = -gradient / case.recipe.rate(0)
    settings = Settings(case.microbatches, case.replicas, case.coefficients or {}, None)
    columns: list[np.ndarray] = []
    for start, group in zip(run.starts[: place + 1], run.groups, strict=False):
        records = [oracle.microbatch(start, mb, "as given") for mb in group]
        columns += shares_of(Candidate(), records, records, settings)
    basis = np.stack([np.broadcast_to(c, gradient.shape) for c in columns], axis=1)
    if basis.shape[1] > basis.shape[0] or not (
        np.isfinite(basis).all() and np.isfinite(gradient).all()
    ):
        return []
    solved, *_ = np.linalg.lstsq(basis, gradient, rcond=None)
    left = norm(basis @ solved - gradient)
    if left > 1e-2 * norm(gradient):
        return []
    return [round(float(x), 4) for x in solved]


def tolerance_of(judge: Judge, run: Run, quantity: str = "change") -> float:
    """The largest relative tolerance in a run, rounding of the parameters included."""
    if quantity != "change":
        return max(tolerances.get(quantity, judge.noise) for tolerances in judge.tolerances(run))
    worst = 0.0
    for tolerances, start, seen in zip(judge.tolerances(run), run.starts, run.seen, strict=True):
        size = norm(seen.change)
        base = 0.0 if run.gradient_only else norm(start)
        if size and np.isfinite(size):
            worst = max(worst, tolerances["change"] + judge.eps * (1 + base / size))
    return worst


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


def _telling(judge: Judge, runs: list[Run]) -> Run:
    """The first run in which the step is not right."""
    return next((run for run in runs if not judge.fit(Candidate(), run).fits), runs[-1])


def _quantity(fit: Fit, run: Run) -> str:
    if fit.quantity != "change":
        return f"optimizer's {fit.quantity}"
    return "gradient" if run.gradient_only else "update"


def _ratio(other: float, own: float) -> float:
    return other / own if own else float("inf")


def _leaked(candidate: Candidate, run: Run, place: int) -> list[int]:
    before = run.examples[:place]
    if candidate.leak_from >= 0:
        before = [before[-1][candidate.leak_from :]] if before else []
    return sorted({i for group in before for rows in group for i in rows})


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

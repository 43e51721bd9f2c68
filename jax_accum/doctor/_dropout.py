"""Whether the microbatches of a group draw masks of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_accum.doctor import _names as known
from jax_accum.doctor._advice import ADVICE
from jax_accum.doctor._candidate import Candidate, Settings, gradient_of
from jax_accum.doctor._case import UnusableStepError
from jax_accum.doctor._diagnosis import Diagnosis
from jax_accum.doctor._predict import Run
from jax_accum.doctor._probes import Probe, cut, example_weights, made
from jax_accum.doctor._runs import Subject
from jax_accum.doctor._sums import Oracle
from jax_accum.doctor._vectors import norm


def diagnose_dropout(subject: Subject) -> Diagnosis:
    """Gives the step one microbatch, and the same several times: with fresh masks they differ."""
    case = subject.case
    oracle = Oracle(case)
    ((rows, *_),) = cut(case, example_weights(case, oracle), [case.microbatches], case.seed)
    once = made(case, "one microbatch", [[rows]])
    again = made(case, "the same microbatch several times", [[rows] * case.microbatches])
    alone, repeated = _twice(subject, once), subject.observe(again)
    noise = 8 * oracle.noise(once.groups[0]) + _rounding(alone)
    plain = _change(subject, oracle, once)
    active = _relative(_gradient(subject, alone), plain)
    apart = _relative(repeated.seen[0].change, alone.seen[0].change)
    evidence = {
        "one microbatch against the same several times": apart,
        "one microbatch against no dropout": active,
        "tolerance": noise,
    }
    common: dict[str, Any] = {
        "evidence": evidence,
        "tolerance": noise,
        "not_examined": ["everything but the masks: switch dropout off, and diagnose again"],
    }
    if active <= noise:
        return Diagnosis(
            status="unknown",
            fault=None,
            summary="No dropout is active: one microbatch gives the gradient without it.",
            reasoning=[],
            change="switch dropout on in the step, or take dropout off the case.",
            calls=subject.calls,
            **common,
        )
    if noise > active / 10:
        return Diagnosis(
            status="unknown",
            fault=None,
            summary="Too noisy to tell masks apart: rounding alone comes to "
            f"{noise:.2g} (relative), dropout to {active:.2g}.",
            reasoning=[],
            change="run the same step in float32, or give the doctor its gradient (grad=).",
            calls=subject.calls,
            **common,
        )
    if apart <= noise:
        what, change = ADVICE[known.SAME_MASK]
        return Diagnosis(
            status="fault",
            fault=known.SAME_MASK,
            summary=f"Fault: {known.SAME_MASK}. {what}",
            reasoning=[
                f"Dropout is active: with it, one microbatch is {active:.3g} (relative) away from "
                "the loss without it.",
                f"{case.microbatches} copies of that microbatch gave the same as one of them, to "
                f"{apart:.2g}: with masks of their own they would have averaged several.",
            ],
            change=change,
            calls=subject.calls,
            **common,
        )
    return Diagnosis(
        status="right",
        fault=None,
        summary="Right, as far as masks go: the microbatches of a group draw different ones.",
        reasoning=[
            f"Copies of one microbatch gave an update {apart:.3g} (relative) away from one copy's."
        ],
        change="",
        calls=subject.calls,
        **common,
    )


def _twice(subject: Subject, probe: Probe) -> Run:
    one, two = subject.observe(probe), subject.observe(probe)
    if not np.array_equal(one.seen[0].change, two.seen[0].change):
        raise UnusableStepError(
            "the step is not deterministic even from the same state: begin its random numbers from "
            "a fixed seed in Case.init (a jax.random.key, torch.manual_seed)."
        )
    if not one.seen[0].change.any():
        raise UnusableStepError(
            "the step did nothing with a group of one microbatch: with dropout=True the doctor "
            "needs one that ends a group where its list ends."
        )
    return one


def _gradient(subject: Subject, run: Run) -> np.ndarray:
    change = run.seen[0].change
    return change if subject.gradient_only else -change / subject.case.recipe.rate(0)


def _change(subject: Subject, oracle: Oracle, probe: Probe) -> np.ndarray:
    case = subject.case
    records = [oracle.microbatch(oracle.params, mb, "as given") for mb in probe.groups[0]]
    settings = Settings(case.microbatches, case.replicas, case.coefficients or {}, None)
    return gradient_of(Candidate(), records, settings)[0]


def _rounding(run: Run) -> float:
    size = norm(run.seen[0].change)
    base = 0.0 if run.gradient_only else norm(run.starts[0])
    return 1.2e-7 * (1 + base / size) if size else 0.0


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    return norm(a - b) / max(norm(a), norm(b))

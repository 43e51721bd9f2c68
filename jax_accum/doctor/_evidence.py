"""Evidence: the numbers of a diagnosis, in the run that tells most."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_accum.doctor._candidate import Candidate, Settings, shares_of
from jax_accum.doctor._predict import Run, predict
from jax_accum.doctor._score import Fit, Judge
from jax_accum.doctor._vectors import norm


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
        "quantity": f"norm of the {quantity_of(right, run)}",
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


def telling(judge: Judge, runs: list[Run]) -> Run:
    """The first run in which the step is not right."""
    return next((run for run in runs if not judge.fit(Candidate(), run).fits), runs[-1])


def quantity_of(fit: Fit, run: Run) -> str:
    """In words, what deviates most."""
    if fit.quantity != "change":
        return f"optimizer's {fit.quantity}"
    return "gradient" if run.gradient_only else "update"


def leaked_in(candidate: Candidate, run: Run, place: int) -> list[int]:
    """The examples of earlier groups that a group holds."""
    before = run.examples[:place]
    if candidate.leak_from >= 0:
        before = [before[-1][candidate.leak_from :]] if before else []
    return sorted({i for group in before for rows in group for i in rows})

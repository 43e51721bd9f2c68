"""diagnose: runs somebody's step, and names what is wrong with it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jax_accum.doctor import _faults as faults
from jax_accum.doctor import _names as known
from jax_accum.doctor._additive import not_additive
from jax_accum.doctor._answers import Findings, answer_batch, answer_fault, answer_right, unknown
from jax_accum.doctor._candidate import RIGHT, Candidate
from jax_accum.doctor._case import Case, UnusableStepError, check_examples
from jax_accum.doctor._diagnosis import Diagnosis
from jax_accum.doctor._dropout import diagnose_dropout
from jax_accum.doctor._predict import Run
from jax_accum.doctor._probes import ALONE, NAMES, plan, separating
from jax_accum.doctor._runs import RandomStepError, Subject, check_subject
from jax_accum.doctor._score import Judge
from jax_accum.doctor._sums import Oracle

MORE_CUTS = 3
CLEAR = 3
"""A name is given only where the right way is this many tolerances off, and two at once only
where every single fault is."""
REDRAWS = 8


def diagnose(
    update: Callable[..., Any] | None = None,
    case: Case | None = None,
    *,
    grad: Callable[..., Any] | None = None,
) -> Diagnosis:
    """Runs a training step under chosen groups, and says by name what is wrong with it.

    The step is a black box: everything it did is held against what each known fault would have
    done, computed in float64 from the sums and weights of the microbatches. A name is given only
    if one fault explains all runs to within rounding errors, and no other does; otherwise the
    answer is "unknown", with the measured deviation.

    Args:
      update: `update(params, opt_state, microbatches) -> (params, opt_state)`, one group in, one
        update out; it may return metrics as a third. `microbatches` is a list of trees of NumPy
        arrays. It may compute in any framework.
      case: what it trains; see `Case`.
      grad: instead of `update`: `grad(params, microbatches) -> gradients`, as handed to the
        optimizer. Says less (nothing of clipping, schedules or decay), with less rounding.

    Returns:
      a `Diagnosis`; `print` shows it, `to_json()` is for programs.

    Raises:
      UnusableStepError: (a ValueError) the step raises, is random, ignores or changes its
        microbatches, changes its parameters in place, or returns another tree.
      TypeError: neither or both of `update` and `grad`, or no case.

    Example:
      >>> import numpy as np, jax, jax.numpy as jnp, jax_accum as ja
      >>> def loss_fn(w, batch):
      ...     told = batch["labels"] != -100
      ...     error = jnp.where(told, jnp.tanh(batch["x"] @ w) - batch["labels"], 0)
      ...     return ja.Weighted(jnp.sum(error**2), jnp.sum(told))
      >>> rng = np.random.default_rng(0)
      >>> labels = np.where(rng.random((16, 6)) < 0.6, 1.0, -100).astype(np.float32)
      >>> x = rng.normal(size=(16, 6, 8)).astype(np.float32)
      >>> case = ja.doctor.Case(
      ...     params=np.full(8, 0.1, np.float32), loss_fn=loss_fn, labels="labels",
      ...     examples=[{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)])
      >>> mean_grad = jax.jit(jax.grad(lambda w, batch: loss_fn(w, batch).mean))
      >>> def grad(w, microbatches):
      ...     return sum(mean_grad(w, b) for b in microbatches) / len(microbatches)
      >>> ja.doctor.diagnose(grad=grad, case=case).fault
      'mean of means'
    """
    if not isinstance(case, Case):
        raise TypeError(f"case must be a doctor.Case, got {type(case).__name__}.")
    began = time.perf_counter()
    found = _diagnose(Subject(case, update, grad), case)
    return dataclasses.replace(found, seconds=time.perf_counter() - began)


def _diagnose(subject: Subject, case: Case) -> Diagnosis:
    if case.dropout:
        return diagnose_dropout(subject)
    case, oracle, probes = _tellable(case)
    subject.case = case
    core = probes["two full groups"]
    other = separating(case, oracle, 0, groups=len(core.groups))
    try:
        first = check_subject(subject, core, other)
    except RandomStepError as error:
        judge = Judge(case, oracle, oracle.noise(core.groups[0]))
        found = _named(judge, [error.run], _singles(judge, subject), {})
        if found.name not in (known.LEAK,):
            raise
        return answer_fault(found, judge, [error.run], subject)
    judge = Judge(case, oracle, oracle.noise(core.groups[0]))
    return _examine(subject, judge, probes, first)


def _tellable(case: Case) -> tuple[Case, Oracle, dict[str, Any]]:
    """The case and its probes; with other examples if these are too alike and it may redraw."""
    oracle = Oracle(case)
    probes = plan(case, oracle)
    for seed in range(1, REDRAWS + 1):
        if case.redraw is None or not too_alike(oracle, probes):
            break
        examples = list(case.redraw(seed))
        check_examples(examples, case.labels)
        case = case.replace(examples=examples)
        oracle = Oracle(case)
        probes = plan(case, oracle)
    return case, oracle, probes


def too_alike(oracle: Oracle, probes: dict[str, Any]) -> bool:
    """Whether the microbatches of the first full group all weigh the same."""
    group = probes["two full groups"].groups[0]
    weights = [
        sum(
            next(iter(part.values())).weight
            for part in oracle.microbatch(oracle.params, mb, "as given")
        )
        for mb in group
    ]
    return bool(np.ptp(weights) == 0)


def _singles(judge: Judge, subject: Subject) -> list[Candidate]:
    return faults.candidates(
        judge.case, gradient_only=subject.gradient_only, terms=judge.oracle.terms()
    )


def _examine(subject: Subject, judge: Judge, probes: dict[str, Any], core: Run) -> Diagnosis:
    case = subject.case
    singles = _singles(judge, subject)
    effects: dict[Any, float] = {}
    runs: list[Run] = []
    problem = False
    undivided = judge.fit(singles[0], core).fits  # then the losses are the same
    for name, probe in probes.items():
        if undivided and name == ALONE:
            continue
        run = core if name == core.name else subject.observe(probe)
        runs.append(run)
        if not problem and judge.fit(singles[0], run).fits:
            continue
        if not problem and len(run.groups) == 1 and _waits(judge, run, singles):
            runs.pop()  # what it does with full groups comes first
            continue
        problem = True
        found = _named(judge, runs, singles, effects)
        if not found.names:
            return unknown(judge, runs, subject, singles)
        if found.name is not None and any(run is core for run in runs):
            return answer_fault(found, judge, runs, subject)
    if problem:
        for number in range(1, MORE_CUTS + 1):
            try:
                runs.append(subject.observe(separating(case, judge.oracle, number)))
            except UnusableStepError:  # a step that takes full groups only
                break
            found = _named(judge, runs, singles, effects)
            if found.name is not None:
                return answer_fault(found, judge, runs, subject)
            if not found.names:
                break
        return unknown(judge, runs, subject, singles, _named(judge, runs, singles, effects).names)
    apart = not_additive(judge.oracle, [mb for g in core.groups for mb in g], judge.noise)
    if apart > judge.noise:
        return answer_batch(apart, judge, runs, subject)
    alike = sorted({c.name for c in singles[1:] if judge.fits_all(c, runs)})
    return answer_right(judge, runs, subject, alike)


def _waits(judge: Judge, run: Run, singles: list[Candidate]) -> bool:
    """Whether the step may treat one microbatch as a group that is not full."""
    names = (known.PARTIAL_DROPPED, known.PARTIAL_CARRIED, known.PARTIAL_BY_FULL)
    return any(judge.fit(c, run).fits for c in singles if c.name in names)


def _named(
    judge: Judge, runs: list[Run], singles: list[Candidate], effects: dict[Any, float]
) -> Findings:
    """What explains all runs: one fault, else two at once."""
    if all(judge.fit(singles[0], run).score < CLEAR for run in runs):
        return Findings(None, [], [])
    fitting = [c for c in singles if c.name != RIGHT and judge.fits_all(c, runs)]
    names = _names(fitting)
    if names:
        return Findings(names[0] if len(names) == 1 else None, names, fitting)
    if any(max(judge.fit(c, run).score for run in runs) < CLEAR for c in singles):
        return Findings(None, [], [])  # one fault nearly explains it: no case for two
    both = [
        pair
        for pair in faults.pairs([c for c in singles if _can_show(c, runs)])
        if judge.fits_early(pair, runs[-1]) and judge.fits_all(pair, runs)
    ]
    if not both:
        return Findings(None, [], [])
    single = {(c.name, c.way): c for c in singles}

    def effect(name: str, way: str) -> float:
        key = (name, way, len(runs))
        if key not in effects:
            effects[key] = judge.distance(singles[0], single[name, way], runs)
        return effects[key]

    ordered = []
    for pair in both:
        ways = zip(pair.name.split(" + "), pair.way.split("; "), strict=True)
        ordered.append(sorted(ways, key=lambda nw: -effect(*nw)))
    larger = _names(Candidate(name=o[0][0]) for o in ordered)
    smaller = sorted({o[1][0] for o in ordered})
    if len(larger) > 1:
        return Findings(None, _names(both), both)
    return Findings(larger[0], larger, both, also=" or ".join(smaller))


def _can_show(candidate: Candidate, runs: list[Run]) -> bool:
    """Whether a run has what a fault needs to show itself, beside another one."""
    probes = {run.name for run in runs}
    hidden = {"empty", "ignored"} if not probes & {NAMES["empty"], NAMES["ignored"]} else set()
    if NAMES["nonfinite"] not in probes:
        hidden.add("nonfinite")
    return not candidate.knobs() or not candidate.knobs().keys() <= hidden


def _names(found: Iterable[Candidate]) -> list[str]:
    return list(dict.fromkeys(c.name for c in found))

"""preflight: one update on a little real data before a long run, checked line by line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_accum._counts import counts as counts_of
from jax_accum.doctor._candidate import Candidate, Settings, shares_of
from jax_accum.doctor._case import Case, parts
from jax_accum.doctor._memory import memory_growth
from jax_accum.doctor._predict import Run, Seen
from jax_accum.doctor._probes import Probe, plan
from jax_accum.doctor._runs import Subject
from jax_accum.doctor._score import Judge
from jax_accum.doctor._sums import Oracle
from jax_accum.doctor._vectors import flat, norm


@dataclasses.dataclass(frozen=True)
class Line:
    """One check.

    Attributes:
      side: whose.
      name: what was checked.
      passed: or not; None if it could not be checked.
      detail: the numbers.
    """

    side: str
    name: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        word = {True: "passed", False: "FAILED", None: "left out"}[self.passed]
        return f"{word:8}  {self.side}: {self.name}: {self.detail}"


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What the checks came to.

    Attributes:
      lines: in order.
    """

    lines: list[Line]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(line.passed is not False for line in self.lines)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    def to_json(self) -> str:
        """As a JSON object."""
        return json.dumps(
            {"passed": self.passed, "lines": [dataclasses.asdict(x) for x in self.lines]}, indent=2
        )


def preflight(
    update: Callable[..., Any] | Mapping[str, tuple[Callable[..., Any], Callable[..., Any] | None]],
    case: Case,
    *,
    counts: Callable[[Any], Mapping[str, int]] | None = None,
    record: Any = None,
) -> Preflight:
    """One update on the case's examples, on every side, before a long run.

    Args:
      update: as for `diagnose`; or by name of the side a pair of it and its `init`, to compare
        several frameworks.
      case: a small set of the run's real data, and its loss.
      counts: `counts(opt_state)` returns counters by the names of `jax_accum.counts`; that
        function itself where the state has them.
      record: a `RunRecord`; the lines are added to its `preparation`.

    Returns:
      a `Preflight`, with a line for each side and check: the examples that reach it, the loss, a
      finite gradient, the update where the group ends, counters, memory of the first group and of
      later ones; and that all sides made the same update.

    Raises:
      UnusableStepError: as `diagnose`.

    Example:
      >>> import numpy as np, jax, jax.numpy as jnp, optax, jax_accum as ja
      >>> def loss_fn(w, batch):
      ...     return ja.Weighted(jnp.sum((batch["x"] @ w - 1) ** 2), len(batch["x"]))
      >>> tx = ja.guard(optax.sgd(0.1))
      >>> step = ja.make_train_step(loss_fn, tx, None, donate=False)
      >>> def update(w, state, microbatches):
      ...     batch = jax.tree.map(lambda *x: np.stack(x), *microbatches)
      ...     return step(w, state, batch, examples=2 * len(microbatches))
      >>> x = np.random.default_rng(0).normal(size=(16, 9)).astype(np.float32)
      >>> case = ja.doctor.Case(
      ...     params=np.ones(9, np.float32), examples=[{"x": row} for row in x], loss_fn=loss_fn,
      ...     init=tx.init, recipe=ja.doctor.Recipe("sgd", learning_rate=0.1))
      >>> report = ja.doctor.preflight(update, case)
      >>> report.passed, report.lines[0].name
      (True, 'every example once')
    """
    if not isinstance(case, Case):
        raise TypeError(f"case must be a doctor.Case, got {type(case).__name__}.")
    sides = update if isinstance(update, Mapping) else {"step": (update, case.init)}
    oracle = Oracle(case)
    probe = plan(case, oracle)["two full groups"]
    probe = Probe(probe.name, probe.groups[:1], probe.examples[:1])
    judge = Judge(case, oracle, oracle.noise(probe.groups[0]))
    lines: list[Line] = []
    changes: dict[str, np.ndarray] = {}
    for name, (step, init) in sides.items():
        side = case.replace(init=init)
        found, changes[name] = _one_side(name, step, side, probe, oracle, judge, counts)
        lines += found
    if len(changes) > 1:
        lines.append(_together(changes, judge))
    result = Preflight(lines)
    if record is not None:
        record.preparation += [f"preflight {line}" for line in lines]
    return result


def _one_side(
    name: str,
    step: Callable[..., Any],
    case: Case,
    probe: Probe,
    oracle: Oracle,
    judge: Judge,
    counts: Callable[[Any], Mapping[str, int]] | None,
) -> tuple[list[Line], np.ndarray]:
    subject = Subject(case, step, None)
    params, state = subject.begin()
    before = flat(params)
    out = subject.call(params, state, probe.groups[0])
    change = flat(out[0]) - before
    run = Run(
        probe.name,
        probe.groups,
        [before],
        [Seen(change, subject.visible(out[1]))],
        False,
        probe.examples,
    )
    right = judge.fit(Candidate(), run)
    finite = bool(np.isfinite(change).all())
    lines = [
        _examples(name, case, probe, oracle, change, right.fits),
        _loss(name, case, probe, oracle, judge, out[2] if len(out) == 3 else None),
        Line(name, "finite", finite, "every entry" if finite else "an inf or NaN in the update"),
        Line(
            name,
            "the group ends in one right update",
            right.fits,
            f"{right.deviation:.2g} (relative) away, {right.score:.2g} of the tolerance",
        ),
        _counters(name, case, out[1], counts),
    ]
    growth = memory_growth(step, case, groups=3)
    lines.append(
        Line(name, "memory of later groups", not growth.grows, str(growth).replace("\n", " "))
    )
    return lines, change


def _examples(
    name: str, case: Case, probe: Probe, oracle: Oracle, change: np.ndarray, right: bool
) -> Line:
    """Solves for how often each example is in the gradient, where it can be seen."""
    what = "every example once"
    settings = Settings(case.microbatches, case.replicas, case.coefficients or {}, None)
    records = [oracle.microbatch(oracle.params, mb, "as given") for mb in probe.groups[0]]
    columns, ids = [], []
    for rows, microbatch in zip(probe.examples[0], probe.groups[0], strict=True):
        singles = parts(microbatch, len(rows))
        for i, single in zip(rows, singles, strict=True):
            part = oracle.part(oracle.params, single)
            columns.append(shares_of(Candidate(), [[part]], records, settings)[0])
            ids.append(i)
    basis = np.stack(columns, axis=1)
    if not case.recipe.plain or basis.shape[1] > basis.shape[0]:
        detail = "seen only through the update as a whole"
        return Line(name, what, right or None, detail)
    times, *_ = np.linalg.lstsq(basis, -change / case.recipe.rate(0), rcond=None)
    wrong = {
        i: round(float(t), 3) + 0.0 for i, t in zip(ids, times, strict=True) if abs(t - 1) > 0.05
    }
    if not wrong:
        return Line(name, what, True, f"{len(ids)} examples, each with its weight")
    return Line(name, what, False, f"by example, how often it is in the gradient: {wrong}")


def _loss(name: str, case: Case, probe: Probe, oracle: Oracle, judge: Judge, metrics: Any) -> Line:
    what = "the loss is the weighted one"
    if not isinstance(metrics, Mapping) or "loss" not in metrics:
        return Line(name, what, None, "update returned no metrics with a loss")
    terms = [
        part for mb in probe.groups[0] for part in oracle.microbatch(oracle.params, mb, "as given")
    ]
    want = 0.0
    for term in terms[0]:
        weight = sum(p[term].weight for p in terms)
        total = sum(p[term].total for p in terms if p[term].weight)
        if weight:
            want += (case.coefficients or {}).get(term, 1.0) * total / weight
    got = float(metrics["loss"])
    return Line(name, what, abs(got - want) <= judge.noise * abs(want), f"{got:.6g}, {want:.6g}")


def _counters(
    name: str, case: Case, state: Any, counts: Callable[[Any], Mapping[str, int]] | None
) -> Line:
    try:
        found = (counts or counts_of)(state)
    except (TypeError, ValueError):
        return Line(name, "counters", None, "the state has none")
    examples = case.microbatches * case.microbatch_size * case.replicas
    want = {
        "attempts": 1,
        "updates": 1,
        "microbatches": case.microbatches * case.replicas,
        "examples": examples,
    }
    # Counters of examples are only moved by callers who say how many they were.
    ignored = {"examples"} if not found.get("examples") else set()
    wrong = {
        k: (found[k], v)
        for k, v in want.items()
        if k in found
        and found[k] != v
        and k not in ignored
        and not (k == "microbatches" and found[k] == case.microbatches)
    }
    if wrong:
        return Line(name, "counters", False, f"(found, wanted): {wrong}")
    return Line(name, "counters", True, ", ".join(f"{k} {found[k]}" for k in want if k in found))


def _together(changes: dict[str, np.ndarray], judge: Judge) -> Line:
    """Whether all sides made the same update, pair by pair."""
    (first, a), *others = changes.items()
    worst = 0.0
    for _, b in others:
        worst = max(worst, norm(a - b) / max(norm(a), 1e-300))
    size = norm(a)
    rounding = judge.eps * (1 + norm(judge.oracle.params) / max(size, 1e-300))
    allowed = 2 * (judge.noise + rounding + judge.correction)
    return Line(
        f"{first} and {', '.join(name for name, _ in others)}",
        "the same update",
        worst <= allowed,
        f"{worst:.2g} (relative) apart, {allowed:.2g} allowed",
    )

"""The judgement: how far each quantity is off, how far rounding lets it be, in chronological order.

The rule. "The same" is judged against a float64 run of the undivided batch in the same framework.
In float32, the accumulated run may be `FACTOR` times as far from it as that framework's own
undivided float32 run is. In float64 nothing more exact is at hand, and the two frameworks and
their undivided runs must agree to `FLOAT64_AGREEMENT`. `tolerances` holds every number and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jax_accum.crosscheck.tolerances import (
    FLOAT32_ROUNDING,
    FLOAT64_ROUNDING,
    NARROW_ROUNDING,
    SCALAR_ULPS,
)
from jax_accum.crosscheck.trace import Trace
from jax_accum.testing._rule import FACTOR, FLOAT64_AGREEMENT, distances

UNDIVIDED = "JAX vs PyTorch, undivided float64"


@dataclass(frozen=True)
class Finding:
    """One quantity held against what it should be.

    Args:
      quantity: ``loss``, ``gradient``, ``gradient norm``, ``parameters`` or ``counter NAME``.
      side: whose it is: ``JAX``, ``PyTorch`` (each against its own undivided float64 run),
        ``JAX vs PyTorch``, or `UNDIVIDED`: the two models before any accumulation.
      update: the update it belongs to, from 1; 0 for totals of the run.
      error: relative distance (L2 over a tree); for a counter, how many it is off.
      allowed: largest error that passes.
      parameter: the JAX path, where one parameter alone is meant.
    """

    quantity: str
    side: str
    update: int
    error: float
    allowed: float
    parameter: str | None = None

    @property
    def ratio(self) -> float:
        """Error as a multiple of what is allowed: above 1 the two differ, NaN counts as inf."""
        if not math.isfinite(self.error):
            return math.inf
        if self.allowed == 0:
            return math.inf if self.error else 0.0
        return self.error / self.allowed

    @property
    def passed(self) -> bool:
        """Whether rounding, or exact equality for a counter, explains the error."""
        return self.ratio <= 1

    @property
    def place(self) -> str:
        """The quantity in words: which, of which parameter, at which update, on which side."""
        name = self.quantity + (f" of {self.parameter}" if self.parameter else "")
        when = f" at update {self.update}" if self.update else ""
        return f"{name}{when} ({self.side})"


@dataclass(frozen=True)
class References:
    """Undivided runs of one framework on the same groups, and why groups make no update.

    Args:
      float32: in float32; of a run in a narrower dtype, in that dtype.
      float64: in float64.
      skips: by group, ``nonfinite``, ``empty`` or None; empty where all make updates.
      pieces: the same groups in float32 and in float64, where the gradient of each microbatch is
        that of a plain program and they are put together without rounding. What the two are apart
        is the framework's own rounding at the size of a microbatch.
    """

    float32: Trace
    float64: Trace
    skips: tuple[str | None, ...] = ()
    pieces: tuple[Trace, Trace] | None = None

    def skipped(self, index: int) -> bool:
        """Whether the group of this index, from 0, makes no update."""
        return bool(self.skips) and self.skips[index] is not None


def judge(
    dtype: str,
    jax: Trace,
    torch: Trace,
    jax_references: References,
    torch_references: References,
    counters: dict[str, int],
    torch_counters: dict[str, int] | None = None,
    scales: list[float] | None = None,
) -> list[Finding]:
    """Compares two accumulated runs of the same examples, each with its own references.

    Args:
      dtype: ``float32``, ``float64``, ``bfloat16`` or ``float16``, of the accumulated runs.
      jax: the accumulated run of JAX.
      torch: the accumulated run of PyTorch.
      jax_references: undivided runs of JAX on the same groups.
      torch_references: undivided runs of PyTorch on the same groups.
      counters: totals that both must show, or JAX where PyTorch's are given.
      torch_counters: totals that PyTorch must show.
      scales: loss scale of each group, that both must show.

    Returns:
      findings in the order in which a run produces the quantities, so that the first that
      failed is where the runs parted.
    """
    findings: list[Finding] = []
    sides = (("JAX", jax, jax_references), ("PyTorch", torch, torch_references))
    allowed = {name: _allow(dtype, refs) for name, _, refs in sides}
    both = _allow_both(dtype, allowed["JAX"], allowed["PyTorch"])
    updates = range(len(jax_references.float64.losses))
    if dtype != "float64":
        # Whether the two models are the same function at all, before anything is accumulated.
        exact = _allow_both("float64", *(_allow("float64", refs) for _, _, refs in sides))
        for index in updates:
            whole = jax_references.float64, torch_references.float64
            if not jax_references.skipped(index):
                findings += _hold(UNDIVIDED, index, *whole, exact)
    for index in updates:
        if jax_references.skipped(index):
            for name, trace, _ in sides:
                findings.append(_untouched(name, index, trace))
            continue
        for name, trace, refs in sides:
            findings += _hold(name, index, trace, refs.float64, allowed[name])
        findings += _hold("JAX vs PyTorch", index, jax, torch, both)
    for name, trace, _ in sides:
        for index, scale in enumerate(scales or ()):
            off = abs(trace.scales[index] - scale)
            findings.append(Finding("loss scale", name, index + 1, off, 0.0))
        expected = torch_counters if torch_counters and name == "PyTorch" else counters
        for counter, value in expected.items():
            off = abs(trace.counters.get(counter, 0) - value)
            findings.append(Finding(f"counter {counter}", name, 0, float(off), 0.0))
    return findings


def first_failure(findings: list[Finding]) -> Finding | None:
    """The first quantity, in the order of the run, that left its tolerance."""
    return next((finding for finding in findings if not finding.passed), None)


def worst(findings: list[Finding]) -> Finding:
    """The quantity that is furthest out, or nearest to its tolerance where all passed.

    Counters come last: they are exact, and have no tolerance that something could be near to.
    """
    exact = [f for f in findings if not f.allowed and not f.passed]
    measured = max(
        (f for f in findings if f.allowed), key=lambda finding: finding.ratio, default=None
    )
    return measured if measured is not None and not (exact and measured.passed) else exact[0]


@dataclass(frozen=True)
class _Allowed:
    """Largest errors that pass: of scalars and parameters by update, of the first gradient."""

    loss: list[float]
    norm: list[float]
    parameters: list[float]
    gradient: float
    by_parameter: dict[str, float]


def _allow(dtype: str, refs: References) -> _Allowed:
    """What one side may be off by, from its own undivided runs."""
    updates = range(len(refs.float64.losses))
    runs = [(refs.float32, refs.float64), *([refs.pieces] if refs.pieces else [])]
    losses = _largest([_errors(low.losses, high.losses) for low, high in runs])
    norms = _largest([_errors(low.norms, high.norms) for low, high in runs])
    moved = _largest([[_moved(low, high, i) for i in updates] for low, high in runs])
    if dtype == "float64":
        # Rounding propagates through the updates as it does in float32, from a smaller start.
        finer = FLOAT64_ROUNDING / FLOAT32_ROUNDING
        agreement = [FLOAT64_AGREEMENT for _ in updates]
        return _Allowed(
            agreement,
            agreement,
            [FACTOR * max(finer * error, FLOAT64_ROUNDING) for error in moved],
            FLOAT64_AGREEMENT,
            dict.fromkeys(refs.float64.gradient, FLOAT64_AGREEMENT),
        )
    scalar_floor = NARROW_ROUNDING.get(dtype, SCALAR_ULPS * FLOAT32_ROUNDING)
    own = [distances(low.gradient, high.gradient) for low, high in runs]
    tree = max(FLOAT32_ROUNDING, *(found.tree for found in own))
    return _Allowed(
        [FACTOR * max(error, scalar_floor) for error in losses],
        [FACTOR * max(error, scalar_floor) for error in norms],
        [FACTOR * max(error, FLOAT32_ROUNDING) for error in moved],
        FACTOR * tree,
        # The error of a parameter with few entries can be small by luck: the tree's stands in.
        {
            path: FACTOR * max(tree, *(found.parameters[path] for found in own))
            for path in refs.float64.gradient
        },
    )


def _allow_both(dtype: str, one: _Allowed, other: _Allowed) -> _Allowed:
    """What two sides may be apart: as far as each may be from the truth, added up."""

    def add(a: list[float], b: list[float]) -> list[float]:
        return [x + y for x, y in zip(a, b, strict=True)]

    parameters = add(one.parameters, other.parameters)
    if dtype == "float64":
        return _Allowed(one.loss, one.norm, parameters, one.gradient, one.by_parameter)
    return _Allowed(
        add(one.loss, other.loss),
        add(one.norm, other.norm),
        parameters,
        one.gradient + other.gradient,
        {path: one.by_parameter[path] + other.by_parameter[path] for path in one.by_parameter},
    )


def _hold(side: str, index: int, got: Trace, want: Trace, allowed: _Allowed) -> Iterator[Finding]:
    """The findings of one update on one side, in the order in which they arise."""
    update = index + 1
    loss = _errors(got.losses, want.losses)[index]
    yield Finding("loss", side, update, loss, allowed.loss[index])
    if index == 0:
        apart = distances(got.gradient, want.gradient)
        yield Finding("gradient", side, update, apart.tree, allowed.gradient)
        for path, error in apart.parameters.items():
            yield Finding("gradient", side, update, error, allowed.by_parameter[path], path)
    norm = _errors(got.norms, want.norms)[index]
    yield Finding("gradient norm", side, update, norm, allowed.norm[index])
    moved = _moved(got, want, index)
    yield Finding("parameters", side, update, moved, allowed.parameters[index])


def _untouched(side: str, index: int, trace: Trace) -> Finding:
    """That a skip left every parameter as it was, bit for bit: how many entries it did not."""
    before, after = trace.parameters[index - 1], trace.parameters[index]
    changed = sum(int(np.sum(before[path] != after[path])) for path in after)
    return Finding("parameters kept by a skip", side, index + 1, float(changed), 0.0)


def _errors(got: list[float], want: list[float]) -> list[float]:
    return [_ratio(abs(a - b), abs(b)) for a, b in zip(got, want, strict=True)]


def _moved(got: Trace, want: Trace, index: int) -> float:
    return distances(got.parameters[index], want.parameters[index]).tree


def _largest(runs: list[list[float]]) -> list[float]:
    """The largest error of any run so far, by update.

    Rounding errors only gather: an update at which they cancel says nothing of the next.
    """
    worst = [max(errors) for errors in zip(*runs, strict=True)]
    return [max(worst[: i + 1]) for i in range(len(worst))]


def _ratio(error: float, size: float) -> float:
    if math.isnan(error):
        return math.nan
    return error / size if size else (0.0 if error == 0 else math.inf)

"""What a candidate predicts for a run, group by group, from the parameters that were observed.

Each group starts where the step really was, so that errors do not pile up, and the gradients of
one group serve all candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_accum.doctor._candidate import Candidate, Microbatch, Settings, gradient_of
from jax_accum.doctor._case import Case
from jax_accum.doctor._recipe import Optimizer
from jax_accum.doctor._sums import Oracle
from jax_accum.doctor._vectors import norm

Tree = Any


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one group did, observed or predicted.

    Attributes:
      change: of the parameters, flat; or the gradient, of a step that returns gradients.
      visible: what of the optimizer's state can be seen, by name, flat.
    """

    change: np.ndarray
    visible: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Run:
    """A sequence of groups that the step was given, and what it did.

    Attributes:
      name: of the probe.
      groups: lists of microbatches.
      starts: parameters before each group, flat, float64, as observed.
      seen: by group.
      gradient_only: whether changes are gradients.
      examples: by group and microbatch, the indices of the case's examples in it.
    """

    name: str
    groups: list[list[Tree]]
    starts: list[np.ndarray]
    seen: list[Seen]
    gradient_only: bool
    examples: list[list[list[int]]]


def predict(
    candidate: Candidate,
    run: Run,
    case: Case,
    oracle: Oracle,
    *,
    shake: np.random.Generator | None = None,
    by: float = 0.0,
    until: int | None = None,
) -> list[Seen]:
    """What the step would have done if it worked like the candidate.

    Args:
      candidate: the way to work.
      run: the groups, and where each began.
      case: the optimizer, and the sizes.
      oracle: the sums.
      shake: disturbs every gradient, to see what rounding errors come to.
      by: relative size of the disturbance.
      until: only so many groups.
    """
    return _Simulation(candidate, run, case, oracle, shake, by).run_all(until)


class _Simulation:
    """One candidate at work on one run."""

    def __init__(
        self,
        candidate: Candidate,
        run: Run,
        case: Case,
        oracle: Oracle,
        shake: np.random.Generator | None,
        by: float,
    ):
        self.candidate, self.run, self.case, self.oracle = candidate, run, case, oracle
        self.shake, self.by = shake, by
        self.optimizer = Optimizer.start(case.recipe, run.starts[0])
        self.settings = Settings(
            case.microbatches, case.replicas, case.coefficients or {}, case.recipe.clip_norm
        )
        self.microbatches = 0  # that went by before the group
        self.poisoned = False
        self.carried: list[Tree] = []
        self.earlier: list[list[Microbatch]] = []

    def run_all(self, until: int | None) -> list[Seen]:
        found = []
        for place, group in enumerate(self.run.groups[:until]):
            start = self.run.starts[place]
            change = self.group(place, group, start)
            seen = {} if self.run.gradient_only else self.optimizer.visible()
            found.append(Seen(change, seen))
            self.microbatches += len(group)
        return found

    def group(self, place: int, group: list[Tree], start: np.ndarray) -> np.ndarray:
        """The change that one group makes."""
        full = self.case.microbatches
        if self.poisoned:
            stuck = self.candidate.nonfinite == "stuck"
            return np.full_like(start, 0.0 if stuck else np.nan)
        if self.candidate.partial == "dropped" and len(group) < full:
            return np.zeros_like(start)
        if self.candidate.partial != "carried":
            return self.end(place, group, start) - (0 if self.run.gradient_only else start)
        self.carried += group
        params = start
        gradient = np.zeros_like(start)
        while len(self.carried) >= full:
            now, self.carried = self.carried[:full], self.carried[full:]
            params = self.end(place, now, params)
            gradient = params
        return gradient if self.run.gradient_only else params - start

    def records(self, batches: Sequence[Tree], params: np.ndarray) -> list[Microbatch]:
        return [self.oracle.microbatch(params, b, self.candidate.loss) for b in batches]

    def end(self, place: int, batches: list[Tree], params: np.ndarray) -> np.ndarray:
        """The parameters after an attempt on these microbatches (or the gradient)."""
        records = self.records(batches, params)
        terms = [term for mb in records for part in mb for term in part.values()]
        if not any(term.weight for term in terms):
            return self.without(self.candidate.empty, params)
        finite = all(t.finite for t in terms if t.weight)
        if not finite:
            return self.without(self.candidate.nonfinite, params)
        if not self.run.gradient_only:
            if self.candidate.when != "once":
                return self.many(batches, params)
            if self.candidate.decays in ("after each", "before each"):
                records = self.decaying(batches, params)
        gradient, shares = gradient_of(
            self.candidate, records, self.settings, earlier=self.earlier, place=place
        )
        self.earlier.append(records)
        if self.shake is not None:
            # What is zero in every microbatch (a token that does not occur) has no rounding errors.
            noise = self.shake.normal(size=gradient.shape) * np.any(shares, axis=0)
            gradient = gradient + noise * (self.by * sum(map(norm, shares)) / (norm(noise) or 1.0))
        if self.run.gradient_only:
            return gradient
        return self.update(gradient, params, len(batches))

    def update(self, gradient: np.ndarray, params: np.ndarray, size: int) -> np.ndarray:
        c, before = self.candidate, self.microbatches
        counts = {"before": before, "within": before + size - 1, "after": before + size}
        return self.optimizer.step(
            gradient,
            params,
            clip=c.clip == "end",
            rate_count=counts.get(c.rate),
            bias_count=before + size if c.bias == "microbatches" else None,
            decays=1 if c.decays == "once" else size,
            averages=1 if c.averages == "once" else size,
        )

    def without(self, way: str, params: np.ndarray) -> np.ndarray:
        """An attempt on a group that should be skipped."""
        if way == "skip":
            return np.zeros_like(params) if self.run.gradient_only else params
        if way in ("accumulator", "stuck"):
            self.poisoned = True
            return params
        if way in ("poison", "nan"):
            self.poisoned = way == "poison" or not self.run.gradient_only
            return np.full_like(params, np.nan)
        if self.run.gradient_only:
            return np.zeros_like(params)
        if way == "counted":
            self.optimizer.updates += 1
            return params
        return self.optimizer.step(np.zeros_like(params), params)

    def decaying(self, batches: list[Tree], params: np.ndarray) -> list[Microbatch]:
        """Sums at parameters that shrink from one microbatch to the next."""
        recipe = self.case.recipe
        keep = 1 - recipe.rate(self.optimizer.updates) * recipe.weight_decay
        before = self.candidate.decays == "before each"
        return [
            self.records([batch], params * keep ** (i + before))[0]
            for i, batch in enumerate(batches)
        ]

    def many(self, batches: list[Tree], params: np.ndarray) -> np.ndarray:
        """The optimizer runs in each microbatch."""
        gradients: list[Microbatch] = []
        size = len(batches)
        for batch in batches:
            record = self.records([batch], params)
            if not any(t.weight for part in record[0] for t in part.values()):
                continue
            gradients = record if self.candidate.when == "each" else gradients + record
            gradient, _ = gradient_of(self.candidate, gradients, self.settings, size=size)
            if self.candidate.when == "cumulative" and self.candidate.divide == "microbatch":
                # The mean so far, times how many there are, over all of them.
                gradient = gradient * (len(gradients) / size)
            params = self.update(gradient, params, 1)
        return params

"""How well candidates fit runs, in units of what rounding errors can explain."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from jax_accum.doctor._candidate import Candidate
from jax_accum.doctor._case import Case
from jax_accum.doctor._faults_update import case_dtype
from jax_accum.doctor._predict import Run, Seen, predict
from jax_accum.doctor._sums import Oracle
from jax_accum.doctor._vectors import norm

NOISE_FACTOR = 8
"""A step may be this many times as noisy as the loss's own gradient in the same dtype: it sums
over microbatches, and its framework may sum in another order."""
FLIPS = 0.05
"""Share of entries that a narrow accumulator may round to the other neighbour."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """How well one candidate explains one run.

    Attributes:
      candidate: which.
      score: largest deviation over its tolerance; at most 1 fits.
      deviation: the largest, relative to the change.
      group: where, from 0.
      quantity: of what: "change", or a name in the state.
    """

    candidate: Candidate
    score: float
    deviation: float
    group: int
    quantity: str

    @property
    def fits(self) -> bool:
        """Whether rounding errors explain the deviation."""
        return self.score <= 1


class Judge:
    """Knows the tolerances of a case, and holds candidates against runs.

    Args:
      case: whose dtype decides.
      oracle: its sums.
      noise: relative error of a gradient, see `Oracle.noise`.
    """

    def __init__(self, case: Case, oracle: Oracle, noise: float):
        self.case, self.oracle = case, oracle
        self.noise = NOISE_FACTOR * noise
        self.eps = float(jnp.finfo(case_dtype(case)).eps)
        # 1 - b2**t is small, and computed in the dtype of the step; it enters by its root.
        recipe = case.recipe
        self.correction = self.eps / (1 - recipe.b2) / 2 if recipe.kind == "adamw" else 0.0
        self._tolerances: dict[int, list[dict[str, float]]] = {}
        self._kept: dict[tuple[int, Candidate], Fit] = {}
        self._early: dict[int, int | None] = {}
        self._runs: list[Run] = []  # keeps their ids from being given to others

    def tolerances(self, run: Run) -> list[dict[str, float]]:
        """By group and quantity, relative to its size: what noise in the gradients comes to."""
        if id(run) not in self._tolerances:
            self._runs.append(run)
            right = Candidate()
            still = predict(right, run, self.case, self.oracle)
            worst = [dict.fromkeys(("change", *seen.visible), self.noise) for seen in still]
            for seed in range(3):
                rng = np.random.default_rng(seed)
                shaken = predict(right, run, self.case, self.oracle, shake=rng, by=self.noise)
                for tolerance, a, b in zip(worst, still, shaken, strict=True):
                    for name, x, y in _compared(a, b):
                        size = norm(x)
                        if size > 0 and np.isfinite(size):
                            moved = norm(x - y) / size
                            tolerance[name] = max(tolerance[name], 2 * moved)
            for tolerance in worst:
                tolerance["change"] += self.correction
            self._tolerances[id(run)] = worst
        return self._tolerances[id(run)]

    def fit(self, candidate: Candidate, run: Run) -> Fit:
        """Holds one candidate against one run."""
        key = (id(run), candidate)
        if key not in self._kept:
            self._kept[key] = self._fit(candidate, run)
        return self._kept[key]

    def _fit(self, candidate: Candidate, run: Run, until: int | None = None) -> Fit:
        predicted = predict(candidate, run, self.case, self.oracle, until=until)
        tolerances = self.tolerances(run)
        worst = Fit(candidate, 0.0, 0.0, 0, "change")
        for place, (want, got) in enumerate(zip(predicted, run.seen, strict=False)):
            for name, x, y in _compared(want, got):
                base = run.starts[place] if name == "change" and not run.gradient_only else x
                tolerance = tolerances[place].get(name, self.noise)
                score, deviation = self._score(candidate, x, y, base, tolerance)
                if score > worst.score:
                    worst = Fit(candidate, score, deviation, place, name)
        return worst

    def _score(
        self,
        candidate: Candidate,
        want: np.ndarray,
        got: np.ndarray,
        base: np.ndarray,
        tolerance: float,
    ) -> tuple[float, float]:
        """Deviation over tolerance, and over the size of the larger one."""
        sizes = norm(want), norm(got)
        if not np.isfinite(sizes).all():
            # Which entries an inf spreads to depends on the code; that it does is the point.
            same = bool(np.isnan(want).any()) == bool((~np.isfinite(got)).any())
            return (0.0, 0.0) if same else (np.inf, np.inf)
        error = want - got
        off, size = norm(error), max(sizes)
        if off == 0:
            return 0.0, 0.0
        deviation = off / size if size else np.inf
        if candidate.accumulator:
            # Single entries may be rounded to the other neighbour; the rest must agree.
            scale = float(np.sqrt(np.mean(want**2)))
            allowed = tolerance * (np.abs(want) + scale) + self.eps * (np.abs(base) + np.abs(want))
            ratio = np.sort(np.abs(error) / np.maximum(allowed, 1e-300))
            return float(ratio[-1 - max(1, int(FLIPS * ratio.size))]), deviation
        allowed_norm = tolerance * sizes[0] + self.eps * (norm(base) + sizes[0])
        return (off / allowed_norm if allowed_norm else np.inf), deviation

    def fits_all(self, candidate: Candidate, runs: Iterable[Run]) -> bool:
        """Whether rounding errors explain every deviation in these runs.

        Asked first about the run that is furthest from right: most candidates end there.
        """
        telling = sorted(runs, key=lambda run: -self.fit(Candidate(), run).score)
        return all(self.fit(candidate, run).fits for run in telling)

    def fits_early(self, candidate: Candidate, run: Run) -> bool:
        """The same up to the first group that is not right, to tell quickly."""
        if id(run) not in self._early:
            self.tolerances(run)
            sizes = range(1, len(run.groups))
            tells = (n for n in sizes if not self._fit(Candidate(), run, n).fits)
            self._early[id(run)] = next(tells, None)
        until = self._early[id(run)]
        return (
            self.fit(candidate, run) if until is None else self._fit(candidate, run, until)
        ).fits

    def distance(self, one: Candidate, other: Candidate, runs: Sequence[Run]) -> float:
        """How far apart what two candidates predict is, relative to its size, at most."""
        worst = 0.0
        for run in runs:
            a = predict(one, run, self.case, self.oracle)
            b = predict(other, run, self.case, self.oracle)
            for x, y in zip(a, b, strict=True):
                for _, u, v in _compared(x, y):
                    if np.isnan(u).any() != np.isnan(v).any():
                        return np.inf
                    size = max(norm(u), norm(v))
                    if size and np.isfinite(size):
                        worst = max(worst, norm(u - v) / size)
        return worst


def _compared(a: Seen, b: Seen) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """What both sides have, by name."""
    return [
        ("change", a.change, b.change),
        *((n, a.visible[n], b.visible[n]) for n in a.visible if n in b.visible),
    ]

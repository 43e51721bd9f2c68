"""A model of a group in float64 NumPy, written from the definition and not from the code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

NAMES = (
    "microbatches",
    "examples",
    "tokens",
    "attempts",
    "updates",
    "skipped_nonfinite",
    "skipped_empty",
)


@dataclass
class Oracle:
    """Groups of microbatches, one list of leaves each, as the definition has them.

    Attributes:
      k: microbatches in the group that begins after so many updates.
      normalise: divide by the weight.
      scale: gradients are of a mean, and multiplied by their weight.
      guarded: a group whose gradient is not finite is skipped.
      rejects: whether a microbatch is turned away.
      counts: by name, of closed groups.
      group: the open group: (gradients, weight, examples, tokens) of each microbatch.
      size: microbatches that fill the open group.
      updated: whether the last call made an update.
    """

    k: Callable[[int], int]
    normalise: bool = True
    scale: bool = True
    guarded: bool = False
    rejects: Callable[[Sequence[np.ndarray]], bool] = lambda grads: False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    group: list[tuple] = field(default_factory=list)
    size: int = 0
    updated: bool = False

    def call(
        self,
        grads: Sequence[np.ndarray] | None,
        weight: float | None = None,
        examples: int = 0,
        flush: bool = False,
    ) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
        """Hands a microbatch over. Returns the gradient of its group if that was an update.

        With it, leaf by leaf, a bound on the rounding of any float32 sum of it, in units
        of the rounding error of one operation.
        """
        opened = not self.group
        if grads is not None and not self.rejects(grads):
            if opened:
                self.size = self.k(self.counts["updates"])
            tokens = 0 if weight is None else round(weight)
            self.group.append((grads, 1.0 if weight is None else weight, examples, tokens))
        full = bool(self.group) and len(self.group) >= self.size
        nothing = opened and not any(w for _, w, _, _ in self.group)
        self.updated = False
        if flush and nothing and not full:
            self.group = []
        return self._close() if full or (flush and self.group) else None

    def _close(self) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
        group, self.group = self.group, []
        self.counts["microbatches"] += len(group)
        self.counts["examples"] += sum(n for _, _, n, _ in group)
        self.counts["tokens"] += sum(n for _, _, _, n in group)
        self.counts["attempts"] += 1
        total = sum(w for _, w, _, _ in group)
        if total == 0:
            self.counts["skipped_empty"] += 1
            return None
        gradient, bound = [], []
        for leaves in zip(*(g for g, w, _, _ in group if w), strict=True):
            weights = [w if self.scale else 1.0 for _, w, _, _ in group if w]
            terms = [w * g for w, g in zip(weights, leaves, strict=True)]
            factor = 1 / total if self.normalise else 1.0
            gradient.append(sum(terms) * factor)
            bound.append((len(terms) + 4) * sum(abs(t) for t in terms) * factor)
        if self.guarded and not all(np.isfinite(g).all() for g in gradient):
            self.counts["skipped_nonfinite"] += 1
            return None
        self.counts["updates"] += 1
        self.updated = True
        return gradient, bound

    def counts_now(self) -> dict[str, int]:
        """The counters, with those of the open group."""
        open_group = {
            "microbatches": len(self.group),
            "examples": sum(n for _, _, n, _ in self.group),
            "tokens": sum(n for _, _, _, n in self.group),
        }
        return {name: n + open_group.get(name, 0) for name, n in self.counts.items()}

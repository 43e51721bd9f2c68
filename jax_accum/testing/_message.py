"""What a comparison of gradients says where it fails: how far, where, and the likely cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jax_accum.testing._causes import constant_ratio, likely_cause
from jax_accum.testing._names import Arrays, shown
from jax_accum.testing._rule import Distances, distances

LISTED = 8
SOME = ", for these alone; or a parameter that several layers share is counted for each"


@dataclass(frozen=True)
class Clues:
    """Numbers by which a mistake may have multiplied or divided; see `assert_same_gradient`."""

    microbatches: int | None = None
    replicas: int | None = None
    weights: tuple[float, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """One gradient held against what it should be.

    Args:
      label: the argument it came as.
      beside: what it is held against, in words.
      tree: the gradient, finite.
      want: what it should be.
      allowed: the distances that pass.
      own: those of the framework's own undivided gradient, where it was given.
      roundoff: of the gradient's type.
    """

    label: str
    beside: str
    tree: Arrays
    want: Arrays
    allowed: Distances
    own: Distances | None
    roundoff: float

    @cached_property
    def off(self) -> Distances:
        """How far it is off."""
        return distances(self.tree, self.want)

    @property
    def failed(self) -> list[str]:
        """The parameters that are further off than allowed, the worst first."""
        off, allowed = self.off.parameters, self.allowed.parameters
        beyond = [name for name in off if off[name] > allowed[name]]
        return sorted(beyond, key=lambda name: off[name] / allowed[name], reverse=True)

    @property
    def passed(self) -> bool:
        """Whether rounding explains all of it."""
        return self.off.tree <= self.allowed.tree and not self.failed


def non_finite(trees: Mapping[str, Arrays]) -> str:
    """The message on NaN or infinity; empty where there is none."""
    found = []
    for label, tree in trees.items():
        places = [
            f"{shown(name)} ({array.size - int(finite.sum())} of {array.size} entries)"
            for name, array in tree.items()
            if not (finite := np.isfinite(array)).all()
        ]
        if places:
            more = f" and {len(places) - LISTED} more parameters" if len(places) > LISTED else ""
            found.append(f"{label} is not finite, first at {', '.join(places[:LISTED])}{more}.")
    return "\n".join(found)


def explain(side: Side, clues: Clues) -> str:
    """The message for a gradient that did not pass."""
    failed = side.failed
    if side.off.tree > side.allowed.tree:
        where, off, allowed = "it", side.off.tree, side.allowed.tree
    else:
        where = shown(failed[0])
        off, allowed = side.off.parameters[failed[0]], side.allowed.parameters[failed[0]]
    ratio = _ratio(side, failed or list(side.want))
    lines = [
        f"{side.label} is not the same gradient: {where} is off by {off:.3g} (relative L2, from "
        f"{side.beside}), and rounding explains {allowed:.3g}.",
        *_reading(side, failed, ratio, clues),
        *_table(side, failed, ratio),
    ]
    return "\n  ".join(lines)


def _ratio(side: Side, names: list[str]) -> float | None:
    """The constant that these parameters are too large by, where rounding explains the rest."""
    return constant_ratio(
        {name: side.tree[name] for name in names},
        {name: side.want[name] for name in names},
        _slack(side),
    )


def _slack(side: Side) -> float:
    # Either of the two may be off by rounding, and so may their ratio.
    return 2 * side.allowed.tree


def _reading(side: Side, failed: list[str], ratio: float | None, clues: Clues) -> list[str]:
    """Which parameters are off, whether by a constant, and why that may be."""
    whole = len(failed) in (0, len(side.want))
    which = "every parameter" if whole else f"{len(failed)} of {len(side.want)} parameters"
    if ratio is None:
        return [
            f"In {which} the ratio of the two differs from entry to entry: examples lost, repeated "
            "or weighted wrongly (a mean of means, another microbatch's mask), or clipped before "
            "the sum."
        ]
    cause = likely_cause(
        ratio, _slack(side), clues.microbatches, clues.replicas, clues.weights, clues.factors
    )
    return [
        f"{side.label} is {ratio:.6g} times {side.beside} in {which}.",
        f"Likely cause: {cause}{'' if whole else SOME}."
        if cause
        else "No number that is known makes that ratio.",
    ]


def _table(side: Side, failed: list[str], ratio: float | None) -> list[str]:
    rows = [("worst parameters", "relative error", "allowed", "over own rounding")]
    for name in failed[:LISTED]:
        off = side.off.parameters[name]
        own = max(side.own.parameters[name] if side.own else 0.0, side.roundoff)
        alone = _ratio(side, [name]) if ratio is None and side.want[name].size > 1 else None
        times = "" if alone is None else f" ({alone:.6g} times)"
        cells = f"{off:.3g}", f"{side.allowed.parameters[name]:.3g}", f"{off / own:.2g}{times}"
        rows.append((shown(name), *cells))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    if len(failed) > LISTED:
        lines.append(f"and {len(failed) - LISTED} more of {len(side.want)}")
    return lines

"""What a constant ratio between two gradients says about the mistake behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jax_accum.testing._names import Arrays
from jax_accum.testing._rule import inner, norm


def constant_ratio(got: Arrays, want: Arrays, within: float) -> float | None:
    """The r for which `got` = r × `want` over all names, where there is one.

    Args:
      got: arrays by name, all finite.
      want: arrays of the same names and shapes, all finite.
      within: how far `got` may be from r × `want`, relative to itself.

    Example:
      >>> import numpy as np
      >>> constant_ratio({"a": np.array([2.0, 4.0])}, {"a": np.array([1.0, 2.0])}, 1e-12)
      2.0
      >>> constant_ratio({"a": np.array([2.0, 5.0])}, {"a": np.array([1.0, 2.0])}, 1e-12)
    """
    size = sum(inner(want[name], want[name]) for name in want)
    length = math.hypot(*(norm(got[name]) for name in want))
    if not size or not length:
        return 0.0 if size else None
    ratio = sum(inner(want[name], got[name]) for name in want) / size
    left = math.hypot(*(norm(got[name] - ratio * want[name]) for name in want))
    return ratio if left <= within * length else None


def likely_cause(
    ratio: float,
    within: float,
    microbatches: int | None,
    replicas: int | None,
    weights: Iterable[float],
    factors: Mapping[str, float],
) -> str | None:
    """The mistake that makes a gradient `ratio` times what it should be, in words.

    Args:
      ratio: of the wrong gradient to the right one.
      within: relative error of the ratio that rounding explains.
      microbatches: of the group, on each replica.
      replicas: that hold a part of the group.
      weights: of every microbatch on every replica.
      factors: further numbers that may be at fault, by name.

    Example:
      >>> likely_cause(0.25, 1e-6, 4, None, (), {})
      'divided by the number of microbatches twice (1/A, A = 4)'
    """
    if ratio == 0:
        return "the gradient is 0: returned before the group ended, or cut off (stop_gradient)"
    causes = _causes(microbatches, replicas, list(weights), factors)
    for cause, expected in causes.items():
        for sign, note in ((1, ""), (-1, ", and the sign turned: an update is minus a gradient")):
            if abs(sign * ratio / expected - 1) <= within and expected != 1:
                return cause + note
    if abs(ratio + 1) <= within:
        return "the sign is turned: an update of plain SGD is minus a gradient"
    for whole, how in ((ratio, "not divided by"), (1 / ratio, "divided once too often by")):
        nearest = round(whole)
        if nearest > 1 and abs(whole / nearest - 1) <= within:
            return (
                f"{how} {nearest}: a number of microbatches, of replicas, of tokens or examples, "
                "or a loss scale"
            )
    return None


def _causes(
    microbatches: int | None,
    replicas: int | None,
    weights: list[float],
    factors: Mapping[str, float],
) -> dict[str, float]:
    """Mistakes, each with the ratio that it makes; the first of equal ones is the likelier."""
    causes: dict[str, float] = {}
    if microbatches:
        a = f"A = {microbatches}"
        causes[f"not divided by the number of microbatches ({a})"] = microbatches
        causes[f"divided by the number of microbatches twice (1/A, {a})"] = 1 / microbatches
    if replicas:
        d = f"D = {replicas}"
        causes[f"summed over the replicas instead of averaged ({d})"] = replicas
        causes[
            f"averaged over the replicas, though divided by the whole weight already (1/D, {d})"
        ] = 1 / replicas
    if microbatches and replicas:
        both = microbatches * replicas
        causes[f"divided neither by microbatches nor by replicas (A D = {both})"] = both
        causes[f"divided by microbatches and replicas twice (1/(A D), A D = {both})"] = 1 / both
    total = sum(weights)
    if total:
        causes[f"not divided by the group's whole weight ({total:g})"] = total
        causes[f"divided by the group's whole weight twice ({total:g})"] = 1 / total
        for weight in dict.fromkeys((weights[-1], *weights)):
            if weight and weight != total:
                causes[
                    f"divided by the weight of one microbatch ({weight:g}) instead of the whole "
                    f"group's ({total:g})"
                ] = total / weight
        count = len(weights)
        causes[
            f"divided by the number of microbatches ({count}) instead of their weight ({total:g})"
        ] = total / count
    for name, value in factors.items():
        causes[f"multiplied by {name} ({value:g})"] = value
        causes[f"divided by {name} ({value:g})"] = 1 / value
    return causes

"""The faults that the doctor knows, as candidates: how the gradient of a group is made wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_accum.doctor import _faults_update as more
from jax_accum.doctor import _names as n
from jax_accum.doctor._candidate import RIGHT, Candidate, ways
from jax_accum.doctor._case import Case


def candidates(case: Case, *, gradient_only: bool, terms: Sequence[str]) -> list[Candidate]:
    """Every single fault that this case could show, in all its ways, and the right one first.

    Args:
      case: what it has (replicas, a clip norm, a schedule, …) decides.
      gradient_only: the step returns gradients, and runs no optimizer.
      terms: of the loss, by name.
    """
    found = [Candidate(), *_division(case), *_selection(), *_leaks(case), *_scales(case)]
    if len(terms) > 1:
        found += _terms(terms)
    if case.replicas > 1:
        found += more.replicas()
    if case.labels is not None:
        found += more.labels()
    found += more.groups(case)
    if not gradient_only:
        found += more.optimizer(case)
    return found


def _division(case: Case) -> list[Candidate]:
    each = "part" if case.replicas > 1 else "microbatch"
    found = ways(
        n.MEAN_OF_MEANS,
        (
            "each microbatch is divided by its own weight, then all by their number",
            {"divide": "microbatch"},
        ),
    )
    if case.replicas > 1:
        found += ways(
            n.MEAN_OF_MEANS,
            (
                "each replica's microbatch is divided by its own weight, then all by their number",
                {"divide": "part"},
            ),
        )
    found += ways(
        n.DIVIDED_TWICE,
        ("once more by the microbatches of the group", {"power_a": -1}),
        ("once more by the microbatches of a full group", {"power_full": -1}),
        ("twice more by the microbatches of the group", {"power_a": -2}),
        ("twice more by the microbatches of a full group", {"power_full": -2}),
    )
    found += ways(
        n.NOT_DIVIDED,
        ("the microbatches' mean gradients are added up", {"divide": each, "power_a": 1}),
        ("too large by the number of microbatches", {"power_a": 1}),
        ("the gradient of the summed loss is used as it is", {"divide": "nothing"}),
        (
            "the summed loss is divided by the microbatches, not by the weight",
            {"divide": "nothing", "power_a": -1},
        ),
    )
    return found


def _terms(names: Sequence[str]) -> list[Candidate]:
    return [
        Candidate(name=n.FIRST_TERM, way=way.format(name), divide=f"{kind}: {name}")
        for name in names
        for kind, way in (
            ("term", "all terms are divided by the group's weight of “{}”"),
            (
                "each term",
                "each microbatch's terms are divided by its weight of “{}”, then averaged",
            ),
        )
    ]


def _selection() -> list[Candidate]:
    found = []
    for name, take in ((n.LAST, "last"), (n.FIRST, "first")):
        found += ways(
            name,
            ("divided by its own weight", {"take": take}),
            (
                "divided by its own weight and by the number of microbatches",
                {"take": take, "power_a": -1},
            ),
            ("divided by the weight of the group", {"take": take, "weights_of": "all"}),
        )
    return found + ways(
        n.LOST,
        ("cleared after the first microbatch of a group", {"take": "all but the first"}),
        (
            "cleared after the first microbatch of a group, whose weight counts",
            {"take": "all but the first", "weights_of": "all"},
        ),
    )


def _leaks(case: Case) -> list[Candidate]:
    found = ways(
        n.LEAK,
        ("the finished gradients of all earlier groups are added", {"leak": "gradients"}),
        ("the sums of all earlier groups are added, but not their weights", {"leak": "sums"}),
        ("sums and weights of all earlier groups are added", {"leak": "sums and weights"}),
    )
    for j in range(1, case.microbatches):
        for leak in ("gradients", "sums"):
            found += ways(
                n.LEAK,
                (
                    f"the previous group is in it from microbatch {j + 1} on",
                    {"leak": leak, "leak_from": j},
                ),
            )
    return found


def _scales(case: Case) -> list[Candidate]:
    full = case.microbatches
    patterns: dict[str, tuple[float, ...]] = {}
    for f in (0.5, 2.0):
        for j in range(1, full):
            patterns[f"the first {j} are {f:g} times too large"] = (f,) * j + (1.0,) * (full - j)
            patterns[f"those after the first {j} are {f:g} times too large"] = (1.0,) * j + (f,) * (
                full - j
            )
        patterns[f"each is {f:g} times the one after it"] = tuple(
            f ** (full - 1 - i) for i in range(full)
        )
        patterns[f"each is {f:g} times the one before it"] = tuple(f**i for i in range(full))
    none = (1.0,) * full
    return [
        Candidate(
            name=n.SCALE_MOVED,
            way=f"{way}, {when}",
            scales=(
                none if when == "from the second group on" else scales,
                none if when == "in the first group" else scales,
            ),
        )
        for way, scales in patterns.items()
        for when in ("in every group", "in the first group", "from the second group on")
    ]


def undone(one: Candidate, other: Candidate) -> bool:
    """Whether two faults are one factor: too large and too small by it."""
    return {one.name, other.name} == {n.NOT_DIVIDED, n.DIVIDED_TWICE}


def pairs(singles: list[Candidate]) -> list[Candidate]:
    """Two faults at once, where they turn different knobs."""
    simple = [c for c in singles if c.name not in (RIGHT, n.SCALE_MOVED, n.NARROW)]
    found = []
    for i, one in enumerate(simple):
        for other in simple[i + 1 :]:
            both = one.joined(other)
            if both is not None and one.name != other.name and not undone(one, other):
                found.append(dataclasses.replace(both, way=f"{one.way}; {other.way}"))
    return found

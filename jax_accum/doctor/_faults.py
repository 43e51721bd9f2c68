"""The faults that the doctor knows: their candidates, what they are, and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_accum.doctor._candidate import RIGHT, Candidate
from jax_accum.doctor._case import Case

MEAN_OF_MEANS = "mean of means"
DIVIDED_TWICE = "divided twice"
NOT_DIVIDED = "not divided"
REPLICA_DENOMINATOR = "replica's own denominator"
TIMES_D = "multiplied by the replicas"
OVER_D = "divided by the replicas"
LAST = "last microbatch only"
FIRST = "first microbatch only"
LOST = "first microbatch lost"
LEAK = "previous group leaks in"
PARTIAL_BY_FULL = "partial group divided by the full number"
PARTIAL_DROPPED = "partial group dropped"
PARTIAL_CARRIED = "partial group carried into the next"
IGNORED_COUNTED = "ignored tokens counted"
SHIFT = "shift off by one"
FIRST_TERM = "second term divided by the first one's weight"
CLIP_EACH = "clipped per microbatch"
CLIP_BEFORE = "clipped before dividing"
UPDATE_EACH = "update per microbatch"
CUMULATIVE = "parameters changed inside the group"
DECAY_EACH = "weight decay per microbatch"
RATE_EACH = "schedule counted per microbatch"
BIAS_EACH = "Adam count per microbatch"
EMA_EACH = "EMA per microbatch"
NARROW = "accumulator of too little precision"
SCALE_MOVED = "loss scale changed inside the group"
SKIP_COUNTED = "skipped group counted as an update"
SAME_MASK = "same dropout mask reused"
SAME_ROWS = "same examples on every replica"
NAN_IGNORED = "NaN from an all-ignored microbatch"
POISONED = "poisoned by a non-finite gradient"
BATCH_STATISTICS = "batch statistics"


def _ways(name: str, *ways: tuple[str, dict[str, Any]]) -> list[Candidate]:
    return [Candidate(name=name, way=way, **knobs) for way, knobs in ways]


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
        found += _replicas()
    if case.labels is not None:
        found += _labels()
    found += _groups(case)
    if not gradient_only:
        found += _optimizer(case)
    return found


def _division(case: Case) -> list[Candidate]:
    each = "part" if case.replicas > 1 else "microbatch"
    found = _ways(
        MEAN_OF_MEANS,
        (
            "each microbatch is divided by its own weight, then all by their number",
            {"divide": "microbatch"},
        ),
    )
    if case.replicas > 1:
        found += _ways(
            MEAN_OF_MEANS,
            (
                "each replica's microbatch is divided by its own weight, then all by their number",
                {"divide": "part"},
            ),
        )
    found += _ways(
        DIVIDED_TWICE,
        ("once more by the microbatches of the group", {"power_a": -1}),
        ("twice more by the microbatches of the group", {"power_a": -2}),
        ("twice more by the microbatches of a full group", {"power_full": -2}),
    )
    found += _ways(
        NOT_DIVIDED,
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
        Candidate(name=FIRST_TERM, way=way.format(name), divide=f"{kind}: {name}")
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
    for name, take in ((LAST, "last"), (FIRST, "first")):
        found += _ways(
            name,
            ("divided by its own weight", {"take": take}),
            (
                "divided by its own weight and by the number of microbatches",
                {"take": take, "power_a": -1},
            ),
            ("divided by the weight of the group", {"take": take, "weights_of": "all"}),
        )
    return found + _ways(
        LOST,
        ("cleared after the first microbatch of a group", {"take": "all but the first"}),
        (
            "cleared after the first microbatch of a group, whose weight counts",
            {"take": "all but the first", "weights_of": "all"},
        ),
    )


def _leaks(case: Case) -> list[Candidate]:
    found = _ways(
        LEAK,
        ("the finished gradients of all earlier groups are added", {"leak": "gradients"}),
        ("the sums of all earlier groups are added, but not their weights", {"leak": "sums"}),
        ("sums and weights of all earlier groups are added", {"leak": "sums and weights"}),
    )
    for j in range(1, case.microbatches):
        for leak in ("gradients", "sums"):
            found += _ways(
                LEAK,
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
            name=SCALE_MOVED,
            way=f"{way}, {when}",
            scales=(
                none if when == "from the second group on" else scales,
                none if when == "in the first group" else scales,
            ),
        )
        for way, scales in patterns.items()
        for when in ("in every group", "in the first group", "from the second group on")
    ]


def _replicas() -> list[Candidate]:
    return [
        *_ways(
            REPLICA_DENOMINATOR,
            (
                "each replica divides by its own weight of the group, then the mean is taken",
                {"divide": "replica"},
            ),
        ),
        *_ways(TIMES_D, ("summed over replicas what is a mean already", {"power_d": 1})),
        *_ways(
            OVER_D,
            ("averaged over replicas what had the global denominator", {"power_d": -1}),
            ("twice averaged over replicas", {"power_d": -2}),
        ),
        *_ways(SAME_ROWS, ("each replica works on the rows of the first", {"replicas": "first"})),
    ]


def _labels() -> list[Candidate]:
    return [
        *_ways(
            IGNORED_COUNTED,
            ("they count in the denominator", {"loss": "counted"}),
            ("they are trained on, as label 0", {"loss": "supervised"}),
        ),
        *_ways(
            SHIFT,
            ("each position is held against the label after its own", {"loss": "shifted"}),
            ("each position is held against the label before its own", {"loss": "shifted back"}),
        ),
        *_ways(NAN_IGNORED, ("0 / 0 in its mean", {"ignored": "nan", "empty": "nan"})),
    ]


def _groups(case: Case) -> list[Candidate]:
    found = _ways(
        PARTIAL_BY_FULL,
        (
            "its sum of means is divided by the microbatches of a full group",
            {"power_a": 1, "power_full": -1},
        ),
    )
    found += _ways(PARTIAL_DROPPED, ("no update for it", {"partial": "dropped"}))
    found += _ways(
        PARTIAL_CARRIED, ("it waits for microbatches of the next group", {"partial": "carried"})
    )
    found += _ways(
        SKIP_COUNTED,
        ("the optimizer runs on a gradient of zeros", {"empty": "zero", "nonfinite": "zero"}),
        ("counters advance without an update", {"empty": "counted", "nonfinite": "counted"}),
        ("the optimizer runs on zeros where nothing is supervised", {"empty": "zero"}),
        ("the optimizer runs on zeros where the gradient is not finite", {"nonfinite": "zero"}),
    )
    found += _ways(
        POISONED,
        ("the update is applied, and everything is NaN from then on", {"nonfinite": "poison"}),
        ("the group is skipped, but stays in the accumulator", {"nonfinite": "accumulator"}),
        (
            "the group is skipped, but stays in the accumulator, and so are all after it",
            {"nonfinite": "stuck"},
        ),
    )
    if "float64" not in str(case_dtype(case)) and "16" not in str(case_dtype(case)):
        for dtype in ("bfloat16", "float16"):
            for form in ("shares", "sums", "means"):
                for first in ("", ", first"):
                    found += _ways(
                        NARROW,
                        (
                            f"{form} are added up in {dtype}",
                            {"accumulator": dtype, "rounds": form + first},
                        ),
                    )
    return found


def _optimizer(case: Case) -> list[Candidate]:
    recipe = case.recipe
    found = _ways(
        UPDATE_EACH,
        ("with the mean gradient of each", {"when": "each"}),
        (
            "with the mean gradient of each over the number of microbatches",
            {"when": "each", "power_a": -1},
        ),
    )
    found += _ways(
        CUMULATIVE,
        (
            "the optimizer runs on the sum of means so far",
            {"when": "cumulative", "power_a": 1, "divide": "microbatch"},
        ),
        (
            "the optimizer runs on the sum of means so far over the number of microbatches",
            {"when": "cumulative", "divide": "microbatch"},
        ),
        ("the optimizer runs on what there is of the group's gradient", {"when": "cumulative"}),
    )
    if recipe.clip_norm is not None:
        found += _ways(
            CLIP_EACH,
            ("each mean gradient, then their weighted mean", {"clip": "each"}),
            ("each mean gradient, then their plain mean", {"clip": "each", "divide": "microbatch"}),
        )
        found += _ways(
            CLIP_BEFORE,
            ("the sum is clipped, then divided by the weight", {"clip": "before"}),
            (
                "the sum of means is clipped, then divided by their number",
                {"clip": "before", "divide": "microbatch"},
            ),
        )
    if recipe.weight_decay:
        found += [
            Candidate(name=DECAY_EACH, way=f"the parameters shrink {how}", decays=how)
            for how in ("each", "after each", "before each")
        ]
    if recipe.scheduled:
        found += [
            Candidate(
                name=RATE_EACH, way=f"it is read at the microbatches {how} the group", rate=how
            )
            for how in ("before", "within", "after")
        ]
    if recipe.kind == "adamw":
        found += _ways(
            BIAS_EACH, ("the bias correction counts microbatches", {"bias": "microbatches"})
        )
    if recipe.ema_decay is not None:
        found += _ways(EMA_EACH, ("the average advances in every microbatch", {"averages": "each"}))
    return found


def case_dtype(case: Case) -> Any:
    """The dtype of the parameters, by promotion."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    return jnp.result_type(*(np.asarray(x).dtype for x in jax.tree.leaves(case.params)))


def pairs(singles: list[Candidate]) -> list[Candidate]:
    """Two faults at once, where they turn different knobs."""
    simple = [c for c in singles if c.name not in (RIGHT, SCALE_MOVED, NARROW)]
    found = []
    for i, one in enumerate(simple):
        for other in simple[i + 1 :]:
            both = one.joined(other)
            if both is not None and one.name != other.name:
                found.append(dataclasses.replace(both, way=f"{one.way}; {other.way}"))
    return found

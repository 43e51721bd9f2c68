"""Candidates of replicas, labels, ends of groups and the optimizer."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_accum.doctor import _names as n
from jax_accum.doctor._candidate import Candidate, ways
from jax_accum.doctor._case import Case


def replicas() -> list[Candidate]:
    """Faults of data replicas."""
    return [
        *ways(
            n.REPLICA_DENOMINATOR,
            (
                "each replica divides by its own weight of the group, then the mean is taken",
                {"divide": "replica"},
            ),
        ),
        *ways(n.TIMES_D, ("summed over replicas what is a mean already", {"power_d": 1})),
        *ways(
            n.OVER_D,
            ("averaged over replicas what had the global denominator", {"power_d": -1}),
            ("twice averaged over replicas", {"power_d": -2}),
        ),
        *ways(n.SAME_ROWS, ("each replica works on the rows of the first", {"replicas": "first"})),
    ]


def labels() -> list[Candidate]:
    """Faults of labels: ignored ones, and shifts."""
    return [
        *ways(
            n.IGNORED_COUNTED,
            ("they count in the denominator", {"loss": "counted"}),
            ("they are trained on, as label 0", {"loss": "supervised"}),
        ),
        *ways(
            n.SHIFT,
            ("each position is held against the label after its own", {"loss": "shifted"}),
            ("each position is held against the label before its own", {"loss": "shifted back"}),
        ),
        *ways(n.NAN_IGNORED, ("0 / 0 in its mean", {"ignored": "nan", "empty": "nan"})),
    ]


def groups(case: Case) -> list[Candidate]:
    """Faults at the end of a group: partial ones, skips, the accumulator."""
    found = ways(
        n.PARTIAL_BY_FULL,
        (
            "its sum of means is divided by the microbatches of a full group",
            {"power_a": 1, "power_full": -1},
        ),
    )
    found += ways(n.PARTIAL_DROPPED, ("no update for it", {"partial": "dropped"}))
    found += ways(
        n.PARTIAL_CARRIED, ("it waits for microbatches of the next group", {"partial": "carried"})
    )
    found += ways(
        n.SKIP_COUNTED,
        ("the optimizer runs on a gradient of zeros", {"empty": "zero", "nonfinite": "zero"}),
        ("counters advance without an update", {"empty": "counted", "nonfinite": "counted"}),
        ("the optimizer runs on zeros where nothing is supervised", {"empty": "zero"}),
        ("the optimizer runs on zeros where the gradient is not finite", {"nonfinite": "zero"}),
    )
    found += ways(
        n.POISONED,
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
                    found += ways(
                        n.NARROW,
                        (
                            f"{form} are added up in {dtype}",
                            {"accumulator": dtype, "rounds": form + first},
                        ),
                    )
    return found


def optimizer(case: Case) -> list[Candidate]:
    """Faults of how the optimizer is run."""
    recipe = case.recipe
    found = ways(
        n.UPDATE_EACH,
        ("with the mean gradient of each", {"when": "each"}),
        (
            "with the mean gradient of each over the number of microbatches",
            {"when": "each", "power_a": -1},
        ),
    )
    found += ways(
        n.CUMULATIVE,
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
        found += ways(
            n.CLIP_EACH,
            ("each mean gradient, then their weighted mean", {"clip": "each"}),
            ("each mean gradient, then their plain mean", {"clip": "each", "divide": "microbatch"}),
        )
        found += ways(
            n.CLIP_BEFORE,
            ("the sum is clipped, then divided by the weight", {"clip": "before"}),
            (
                "the sum of means is clipped, then divided by their number",
                {"clip": "before", "divide": "microbatch"},
            ),
        )
    if recipe.weight_decay:
        found += [
            Candidate(name=n.DECAY_EACH, way=f"the parameters shrink {how}", decays=how)
            for how in ("each", "after each", "before each")
        ]
    if recipe.scheduled:
        found += [
            Candidate(
                name=n.RATE_EACH, way=f"it is read at the microbatches {how} the group", rate=how
            )
            for how in ("before", "within", "after")
        ]
    if recipe.kind == "adamw":
        found += ways(
            n.BIAS_EACH, ("the bias correction counts microbatches", {"bias": "microbatches"})
        )
    if recipe.ema_decay is not None:
        found += ways(
            n.EMA_EACH, ("the average advances in every microbatch", {"averages": "each"})
        )
    return found


def case_dtype(case: Case) -> Any:
    """The dtype of the parameters, by promotion."""
    return np.result_type(*(np.asarray(x).dtype for x in jax.tree.leaves(case.params)))

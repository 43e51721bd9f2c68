"""Every number of the judgement, and why it is that number; `compare` says how they are used."""

from __future__ import annotations

from jax_accum.testing._rule import FACTOR, FLOAT64_AGREEMENT, SMALL_PARAMETER

FLOAT32_ROUNDING = 2.0**-24
FLOAT64_ROUNDING = 2.0**-53
NARROW_ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-11}
SCALAR_ULPS = 4.0

TOLERANCES: dict[str, tuple[float, str]] = {
    "FACTOR": (
        FACTOR,
        "an accumulated run adds the same numbers in another order; its error is of the size of "
        "the undivided run's, and four times it leaves room for chance but for no mistake",
    ),
    "FLOAT32_ROUNDING": (
        FLOAT32_ROUNDING,
        "half a unit in the last place: no float32 tree can be expected nearer to a float64 one, "
        "so where an undivided run happens to be nearer, this stands for its error",
    ),
    "FLOAT64_ROUNDING": (FLOAT64_ROUNDING, "the same for float64"),
    "BFLOAT16_ROUNDING": (
        NARROW_ROUNDING["bfloat16"],
        "half a unit in the last place: where an undivided loss or norm computed in bfloat16 "
        "happens to be nearer to the float64 one, this stands for its error",
    ),
    "FLOAT16_ROUNDING": (NARROW_ROUNDING["float16"], "the same for float16"),
    "SCALAR_ULPS": (
        SCALAR_ULPS,
        "a loss or a norm is one number, not thousands whose errors average out: by luck the "
        "undivided one can be exact, so a few roundings always count as its error",
    ),
    "FLOAT64_AGREEMENT": (
        FLOAT64_AGREEMENT,
        "some ten thousand roundings of float64, and a millionth of the error of one float32 "
        "rounding: no mistake in the arithmetic of a loss is that small",
    ),
    "SMALL_PARAMETER": (
        SMALL_PARAMETER,
        "a parameter whose gradient is less than this share of the tree's, such as the bias of "
        "the attention keys, whose gradient is 0 in exact arithmetic, holds little but rounding "
        "of larger numbers: it is measured against this share of the tree's norm",
    ),
}

"""Advice: what takes the memory, and what of it a smaller microbatch would not change."""

from __future__ import annotations

from jax_accum.memory import _analyze
from jax_accum.memory._analyze import Analysis
from jax_accum.memory._budget import readable

_HELP = {
    _analyze.PARAMETERS: "shard them over devices, or keep them in a narrower dtype",
    _analyze.STATE: "shard it over devices, or choose an optimizer that keeps less (Adafactor, "
    "SGD with momentum, moments in bfloat16)",
    _analyze.ACCUMULATOR: 'over several replicas, reduce="each" shards it',
    _analyze.ACTIVATIONS: "recompute them: jax.checkpoint around each layer",
    _analyze.BATCH: "hand over fewer examples per update, or narrower dtypes",
    _analyze.RESULTS: "donate parameters and optimizer state, and return less",
    _analyze.OTHER: "look at what else the step is called with",
}
_LOGITS = "compute them in chunks: ja.losses.chunked_next_token_cross_entropy"
LIVE_LOGITS = 3
"""Copies alive at once in a plain cross entropy: logits, exponentials, gradient (measured)."""


def advise(analysis: Analysis, most: int = 4, first: str = "") -> list[str]:
    """What would help, for the largest parts of the memory, largest first.

    A part below a tenth of the peak is not worth the trouble, and is left out. The part named
    `first`, if it is among them, leads.
    """
    sizes = {part.name: part.bytes for part in analysis.parts}
    if analysis.logits is not None:
        logits = min(LIVE_LOGITS * analysis.logits.bytes, sizes[_analyze.ACTIVATIONS])
        sizes[_analyze.ACTIVATIONS] -= logits
        sizes[_LOGITS_PART] = logits
    help_for = {**_HELP, _LOGITS_PART: _LOGITS}
    ranked = sorted(sizes, key=lambda name: -sizes[name])
    return [
        f"{name}: {readable(sizes[name])}, {sizes[name] / analysis.peak:.0%} of the peak; "
        f"{help_for[name]}"
        for name in sorted(ranked[:most], key=lambda name: name != first)
        if sizes[name] >= analysis.peak / 10
    ]


_LOGITS_PART = "logits and their gradient"


def why_not(analysis: Analysis, budget: int) -> str:
    """Why the smallest microbatch does not fit the budget, with numbers and what would help."""
    parameters, first = analysis.part(_analyze.PARAMETERS), ""
    if parameters > budget:
        first = _analyze.PARAMETERS
        said = (
            f"the parameters alone take {readable(parameters)} on each device, more than the "
            f"budget of {readable(budget)}: no microbatch size changes that."
        )
    else:
        fixed = analysis.peak - analysis.part(_analyze.ACTIVATIONS)
        said = (
            f"the smallest microbatch needs {readable(analysis.peak)} on each device, "
            f"{readable(analysis.peak - budget)} more than the budget of {readable(budget)}. Of it "
            f"{readable(fixed)} would stay however small the microbatch: accumulation alone is "
            "not enough."
        )
    return (
        said
        + " What would help:"
        + "".join(f"\n  - {line}" for line in advise(analysis, first=first))
    )

"""Symptoms: from what people see to the check that finds the cause."""

from __future__ import annotations

import dataclasses

from jax_accum.doctor import _names as f


@dataclasses.dataclass(frozen=True)
class Symptom:
    """Something that people see.

    Attributes:
      seen: in words.
      causes: faults that show like that, the most frequent first.
      check: what to run, or to look at.
    """

    seen: str
    causes: list[str]
    check: str


SYMPTOMS: dict[str, Symptom] = {
    "small-loss": Symptom(
        "The loss is abnormally small, or the model learns too slowly.",
        [f.DIVIDED_TWICE, f.OVER_D, f.IGNORED_COUNTED, f.CLIP_BEFORE, f.CLIP_EACH],
        "jax-accum doctor module:name, with Recipe('sgd'): Adam hides a constant factor. The "
        "evidence has the share of each microbatch: 1/A in all of them is “divided twice”.",
    ),
    "large-loss": Symptom(
        "The loss or the gradient norm grows with A, or the run diverges.",
        [f.NOT_DIVIDED, f.TIMES_D, f.LEAK, f.CUMULATIVE],
        "jax-accum doctor module:name, with Recipe('sgd') and without clipping.",
    ),
    "partition": Symptom(
        "The result changes with the microbatch size at the same examples per update.",
        [f.MEAN_OF_MEANS, f.REPLICA_DENOMINATOR, f.FIRST_TERM, f.BATCH_STATISTICS, f.SAME_MASK],
        "jax-accum doctor module:name, with examples of very different token counts.",
    ),
    "no-effect": Symptom(
        "Accumulation has no effect: curves are those of the small batch.",
        [f.UPDATE_EACH, f.LAST, f.FIRST, f.SAME_ROWS],
        "jax-accum doctor module:name; count the updates as well (ja.counts, or the optimizer's).",
    ),
    "memory": Symptom(
        "Memory grows over groups.",
        [],
        "ja.doctor.memory_growth(update, case) says which arrays stay. A loss that is appended to "
        "a list with its graph (loss instead of loss.item()), metrics on the device, and a batch "
        "kept by a closure are the usual ones.",
    ),
    "schedule": Symptom(
        "The schedule is shifted: warm-up or decay ends too early.",
        [f.RATE_EACH, f.BIAS_EACH, f.SKIP_COUNTED, f.UPDATE_EACH],
        "jax-accum doctor module:name, with the step's own schedule in Recipe(learning_rate=...).",
    ),
    "nan": Symptom(
        "The loss is NaN, at once or from some update on.",
        [f.NAN_IGNORED, f.POISONED],
        "jax-accum doctor module:name, with Case(labels=...), and examine including 'nonfinite'.",
    ),
    "epoch-end": Symptom(
        "Something odd happens at the end of each epoch.",
        [f.PARTIAL_BY_FULL, f.PARTIAL_DROPPED, f.PARTIAL_CARRIED, f.LEAK],
        "jax-accum doctor module:name, with examine including 'ragged'.",
    ),
    "plateau": Symptom(
        "Many microbatches train worse than few, most of all in reduced precision.",
        [f.NARROW, f.SCALE_MOVED],
        "jax-accum doctor module:name with parameters in float32; look at the accumulator's dtype.",
    ),
    "regularisation": Symptom(
        "Weights are smaller, or averages fresher, than with the undivided batch.",
        [f.DECAY_EACH, f.EMA_EACH],
        "jax-accum doctor module:name, with weight_decay, ema_decay in Recipe and Case.observe.",
    ),
}
"""By a short name."""


def describe(name: str) -> str:
    """A symptom, its causes and the check, as text.

    Raises:
      ValueError: there is no such symptom.

    Example:
      >>> from jax_accum.doctor import describe
      >>> print(describe("schedule").splitlines()[0])
      The schedule is shifted: warm-up or decay ends too early.
    """
    if name not in SYMPTOMS:
        raise ValueError(f"symptom {name!r} is unknown; there are {', '.join(SYMPTOMS)}.")
    symptom = SYMPTOMS[name]
    causes = [f"  - {cause}" for cause in symptom.causes]
    lead = ["It is often caused by:", *causes] if causes else []
    return "\n".join([symptom.seen, *lead, f"Check: {symptom.check}"])

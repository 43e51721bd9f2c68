"""The faults that can be planted on the JAX side: by name, what each is, where it can show.

A check that cannot fail shows nothing. Each of these is a mistake that accumulation loops are
really made with, and the cross-check must find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_accum.crosscheck.cases import Case, hint
from jax_accum.crosscheck.errors import InputError

if TYPE_CHECKING:
    from jax_accum.crosscheck.gpt import GPTSizes
    from jax_accum.crosscheck.jax_side import Loop


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Args:
      name: what ``--plant`` takes.
      meaning: the mistake in one sentence.
      shows_in: whether a case can show it at all.
      loss: the mistake is in the loss function of this name in `fault_loops`, and the loop is
        right; otherwise it is in the loop of the fault's own name.
    """

    name: str
    meaning: str
    shows_in: Callable[[Case], bool]
    loss: bool = False

    def loop(self, case: Case, sizes: GPTSizes) -> Loop:
        """The faulty loop, in place of the library's."""
        from jax_accum.crosscheck import fault_loops, jax_side

        recipe = jax_side.JaxRecipe(sizes, case.optimizer)
        mistake = getattr(fault_loops, self.name.replace("-", "_"))
        return fault_loops.HandWritten(
            recipe,
            case.microbatches,
            case.microbatch_size,
            fault_loops.correct if self.loss else mistake,
            mistake(sizes) if self.loss else recipe.loss,
        )


def find_fault(name: str) -> Fault:
    """The fault of this name.

    Raises:
      InputError: there is none.

    >>> find_fault("no-reset").meaning
    'the accumulator is not emptied when a group begins'
    """
    if name not in FAULTS:
        raise InputError(f"unknown fault {name!r}: {hint(name, list(FAULTS))}")
    return FAULTS[name]


def _always(case: Case) -> bool:
    return True


def _cut(case: Case) -> bool:
    return case.microbatches > 1


def _cut_adamw(case: Case) -> bool:
    return case.microbatches > 1 and case.optimizer == "adamw"


def _partial(case: Case) -> bool:
    return case.last_microbatches < case.microbatches


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "mean-of-means",
            "microbatches with few and with many tokens are averaged as equals",
            _cut,
        ),
        Fault("no-reset", "the accumulator is not emptied when a group begins", _always),
        Fault("divided-twice", "the mean gradient is divided by A once more", _cut),
        Fault("not-divided", "gradients of means are added up and never divided", _cut),
        Fault(
            "replica-denominator",
            "each of two replicas divides by its own tokens before they are averaged",
            _cut,
        ),
        Fault(
            "schedule-per-microbatch",
            "the learning-rate schedule advances with every microbatch",
            _cut_adamw,
        ),
        Fault(
            "clip-per-microbatch", "each microbatch's gradient is clipped on its own", _cut_adamw
        ),
        Fault(
            "clip-before-dividing",
            "the sum of the gradients is clipped, and divided by A afterwards",
            _cut_adamw,
        ),
        Fault("update-per-microbatch", "the optimizer runs on every microbatch", _cut),
        Fault(
            "weight-decay-per-microbatch",
            "weights decay with every microbatch, not with every update",
            _cut_adamw,
        ),
        Fault("last-microbatch-only", "the gradient is overwritten instead of added to", _cut),
        Fault(
            "ignored-tokens-counted",
            "the loss is divided by all positions, padding included",
            _always,
            loss=True,
        ),
        Fault(
            "double-shift",
            "labels are shifted before the loss, which shifts them again",
            _always,
            loss=True,
        ),
        Fault(
            "partial-divided-by-full",
            "the short last group is divided by the size of a full one",
            _partial,
        ),
        Fault("partial-dropped", "the short last group never reaches the optimizer", _partial),
        Fault("bfloat16-accumulator", "gradients are added up in bfloat16", _cut),
        Fault("updates-miscounted", "an update is counted for every microbatch", _cut),
    )
}

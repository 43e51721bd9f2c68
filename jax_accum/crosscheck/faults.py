"""The faults that can be planted on either side: by name, what each is, where it can show.

A check that cannot fail shows nothing. Each of these is a mistake that accumulation loops are
really made with, and the cross-check must find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_accum.crosscheck.cases import Case, hint
from jax_accum.crosscheck.errors import InputError
from jax_accum.crosscheck.matrix import REPLICAS, AnyCase, FullCase

if TYPE_CHECKING:
    from jax_accum.crosscheck.full_data import RowGroup
    from jax_accum.crosscheck.full_jax import Recipe
    from jax_accum.crosscheck.gpt import GPTSizes
    from jax_accum.crosscheck.jax_side import Loop
    from jax_accum.crosscheck.maps import Arrays
    from jax_accum.crosscheck.trace import Trace


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Args:
      name: what ``--plant`` takes.
      meaning: the mistake in one sentence.
      shows_in: whether a case can show it at all.
      loss: the mistake is in the loss function of this name in `fault_loops`, and the loop is
        right; otherwise it is in the loop of the fault's own name.
      side: ``JAX`` or ``PyTorch``, whose names begin with ``torch-``.
    """

    name: str
    meaning: str
    shows_in: Callable[[AnyCase], bool]
    loss: bool = False
    side: str = "JAX"

    def loop(self, case: Case, sizes: GPTSizes) -> Loop:
        """The faulty loop, in place of the library's."""
        from jax_accum.crosscheck import fault_loops, jax_recipe

        recipe = jax_recipe.JaxRecipe(sizes, case.optimizer)
        mistake = getattr(fault_loops, self.name.replace("-", "_"))
        return fault_loops.HandWritten(
            recipe,
            case.microbatches,
            case.microbatch_size,
            fault_loops.correct if self.loss else mistake,
            mistake(jax_recipe.logits_function(sizes)) if self.loss else recipe.loss,
        )

    def full_loop(self, case: FullCase, recipe: Recipe) -> Loop:
        """The faulty loop in a case of the full matrix, on one device."""
        from jax_accum.crosscheck import fault_loops, full_jax
        from jax_accum.crosscheck.matrix import EXAMPLES_PER_UPDATE

        mistake = getattr(fault_loops, self.name.replace("-", "_"))
        return fault_loops.HandWritten(
            recipe,
            case.microbatches,
            EXAMPLES_PER_UPDATE // case.microbatches,
            fault_loops.correct if self.loss else mistake,
            mistake(full_jax.logits_function) if self.loss else recipe.loss,
        )

    def full_trace(self, case: FullCase, weights: Arrays, groups: Sequence[RowGroup]) -> Trace:
        """The run of a faulty PyTorch loop in a case of the full matrix."""
        from jax_accum.crosscheck import torch_fault_ddp, torch_fault_loops
        from jax_accum.crosscheck.torch_hand_loop import Loop

        if self.name == NO_SYNC:
            from torch_ref.launch import spawn

            return spawn(torch_fault_ddp.run, REPLICAS, case, weights, list(groups))[0]
        mistake = self.name.removeprefix("torch-").replace("-", "_")
        loop = getattr(torch_fault_loops, mistake)
        return Loop(case, weights, loop).run(groups)


def find_fault(name: str) -> Fault:
    """The fault of this name.

    Raises:
      InputError: there is none.

    >>> find_fault("no-reset").meaning
    'the accumulator is not emptied when a group begins'
    """
    if name not in ALL_FAULTS:
        raise InputError(f"unknown fault {name!r}: {hint(name, list(ALL_FAULTS))}")
    return ALL_FAULTS[name]


def _always(case: AnyCase) -> bool:
    return not isinstance(case, FullCase) or case.plain


def _cut(case: AnyCase) -> bool:
    return case.microbatches > 1 and _always(case)


def _cut_adamw(case: AnyCase) -> bool:
    return case.optimizer == "adamw" and _cut(case)


def _partial(case: AnyCase) -> bool:
    return case.last_microbatches < case.microbatches and _always(case)


def _in_pytorch(where: Callable[[AnyCase], bool]) -> Callable[[AnyCase], bool]:
    """Of the full matrix alone, in one process."""
    return lambda case: isinstance(case, FullCase) and case.torch == "loop" and where(case)


def _scaled(case: AnyCase) -> bool:
    if not isinstance(case, FullCase) or case.torch != "loop":
        return False
    # Without the group that overflows, which this loop would not skip.
    return case.dtype == "float16" and case.terms == "one" and case.microbatches > 1


def _even_ddp(case: AnyCase) -> bool:
    """Two processes with as many microbatches each: with fewer, one would wait for the other."""
    if not isinstance(case, FullCase) or case.torch != "ddp" or case.microbatches == 1:
        return False
    return case.group == "full" and case.dtype in ("float32", "float64")


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

NO_SYNC = "torch-forward-outside-no-sync"
# The same mistakes under the names that they have in a PyTorch loop.
IN_PYTORCH = {
    "no-reset": "zero-grad-forgotten",
    "schedule-per-microbatch": "scheduler-per-microbatch",
    "last-microbatch-only": "zero-grad-per-microbatch",
}
TORCH_FAULTS = {
    fault.name: fault
    for fault in (
        *(
            Fault(
                f"torch-{IN_PYTORCH.get(name, name)}",
                f"in PyTorch: {fault.meaning}",
                _in_pytorch(fault.shows_in),
                side="PyTorch",
            )
            for name, fault in FAULTS.items()
        ),
        Fault(
            "torch-unscale-per-microbatch",
            "in PyTorch: .grad is divided by the loss scale after every microbatch",
            _scaled,
            side="PyTorch",
        ),
        Fault(
            NO_SYNC,
            "in PyTorch: the forward pass is outside no_sync, so that DDP reduces every microbatch",
            _even_ddp,
            side="PyTorch",
        ),
    )
}
ALL_FAULTS = FAULTS | TORCH_FAULTS

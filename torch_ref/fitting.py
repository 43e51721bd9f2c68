"""An update that runs out of memory is tried again in smaller microbatches.

The facts it stands for:

- A group that ran out is dropped whole and begun anew: same examples, same random numbers, same
  denominator. What the failed attempt did to buffers (running statistics) is undone.
- Only the forward and backward passes shrink with the microbatch. Running out in the optimizer's
  own step is an error, and no reason to try a smaller one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_ref.accumulate import Group, LossFn, accumulate
from torch_ref.train import Attempt, Counts, finish


@dataclass(frozen=True)
class Change:
    """A smaller microbatch taken because memory ran out.

    Attributes:
      examples: trained before it.
      before: microbatch size that did not fit.
      after: the one taken instead.
    """

    examples: int
    before: int
    after: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: CUDA's allocator, the CPU's, or Python.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The CPU's allocator raises a plain RuntimeError.
    said = str(error)
    return isinstance(error, RuntimeError) and (
        "not enough memory" in said or "can't allocate memory" in said
    )


class FittingUpdate:
    """Updates in the largest of the microbatch sizes tried so far that did not run out of memory.

    Args:
      model: trained in place.
      optimizer: over the parameters of ``model``.
      loss_fn: as in `torch_ref.accumulate.accumulate`.
      microbatch_size: examples in a microbatch to begin with.
      max_tries: sizes tried for one group before giving up.
      accumulate_fn: makes the gradient; `torch_ref.accumulate.accumulate` by default.

    Attributes:
      microbatch_size: the present one.
      changes: each smaller size taken, in order.

    Raises:
      ValueError: a size or a number of tries below 1.

    >>> from torch_ref.losses import Weighted
    >>> model = nn.Linear(1, 1, bias=False)
    >>> def loss_fn(model, x):
    ...     if len(x) > 2:
    ...         raise torch.OutOfMemoryError("CUDA out of memory.")
    ...     return Weighted(model(x).sum(), torch.tensor(len(x)))
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> update = FittingUpdate(model, sgd, loss_fn, 6)
    >>> update(torch.ones(6, 1)).group.microbatches, update.changes
    (3, [Change(examples=0, before=6, after=3), Change(examples=0, before=3, after=2)])
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        microbatch_size: int,
        *,
        max_tries: int = 4,
        accumulate_fn: Callable[..., Group] = accumulate,
    ) -> None:
        for name, value in (("microbatch_size", microbatch_size), ("max_tries", max_tries)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.microbatch_size = microbatch_size
        self.max_tries = max_tries
        self.changes: list[Change] = []
        self._accumulate = accumulate_fn
        self._examples = 0

    def __call__(
        self,
        rows: torch.Tensor,
        *,
        coefficients: Any = None,
        counts: Counts | None = None,
        **finish_options: Any,
    ) -> Attempt:
        """One attempt over a group.

        Args:
          rows: the examples of the group, along the first axis.
          coefficients: by term, as in `accumulate`.
          counts: advanced in place, once.
          **finish_options: ``scheduler``, ``clip_norm``, ``on_nonfinite``, as in `finish`.

        Raises:
          ValueError: the microbatch size does not divide the examples.
          MemoryError: no smaller size is left, tries are used up, or memory ran out in the
            optimizer's step, after which parameters may be half updated.
        """
        if not len(rows) or len(rows) % self.microbatch_size:
            raise ValueError(
                f"rows has {len(rows)} examples, which microbatches of {self.microbatch_size} do "
                "not divide: choose a divisor"
            )
        group = self._group(rows, coefficients)
        try:
            attempt = finish(self.model, self.optimizer, group, counts=counts, **finish_options)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(
                "memory ran out in the optimizer's step, which no smaller microbatch makes "
                "smaller; parameters may be half updated: load the last checkpoint"
            ) from error
        self._examples += len(rows)
        return attempt

    def _group(self, rows: torch.Tensor, coefficients: Any) -> Group:
        random = _random_state()
        buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        tried: list[int] = []
        while True:
            try:
                parts = rows.split(self.microbatch_size)
                return self._accumulate(self.model, self.loss_fn, parts, coefficients=coefficients)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
            # Outside of the handler: the error holds the frames, and they the activations.
            self._forget(random, buffers)
            tried.append(self.microbatch_size)
            self._shrink(len(rows), tried, said)

    def _forget(self, random: Any, buffers: dict[str, torch.Tensor]) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        _set_random_state(random)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _shrink(self, examples: int, tried: list[int], said: str) -> None:
        sizes = ", ".join(map(str, tried))
        smaller = [m for m in range(1, self.microbatch_size) if examples % m == 0]
        if not smaller:
            raise MemoryError(
                f"memory ran out at microbatch size {sizes}, and 1 is the least: {said}"
            )
        if len(tried) >= self.max_tries:
            raise MemoryError(
                f"memory ran out at microbatch sizes {sizes}, {self.max_tries} tries: {said}"
            )
        self.changes.append(Change(self._examples, self.microbatch_size, smaller[-1]))
        self.microbatch_size = smaller[-1]


def _random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), cuda


def _set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])

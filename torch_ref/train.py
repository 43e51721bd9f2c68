"""Updates: one per group, with clipping, optimizer and scheduler run once or not at all.

The facts it stands for:

- `groups`: a short last group is a group of its own size, and nothing leaks into the next epoch.
- `update` and `finish`: clip, optimizer, scheduler, in that order, once per group. A skip touches
  none of them.
- `train`: what happened is counted in exact integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torch_ref.accumulate import Group, LossFn, accumulate
from torch_ref.gradients import clip_gradients, first_nonfinite


@dataclass
class Counts:
    """What a run has done so far, in Python ints, which neither wrap nor stall.

    Attributes:
      microbatches: microbatches that entered a group.
      examples: examples in them.
      tokens: weight of the first loss term in them.
      attempts: groups that reached their end.
      updates: attempts that changed the parameters.
      skipped_nonfinite: attempts that a non-finite gradient stopped.
      skipped_empty: attempts in which nothing was supervised.
      dropped_microbatches: microbatches of a short last group that was to be dropped.
    """

    microbatches: int = 0
    examples: int = 0
    tokens: int = 0
    attempts: int = 0
    updates: int = 0
    skipped_nonfinite: int = 0
    skipped_empty: int = 0
    dropped_microbatches: int = 0

    def add(self, group: Group, skipped: str | None) -> None:
        """Counts one attempt."""
        self.microbatches += group.microbatches
        self.examples += group.examples
        self.tokens += group.tokens
        self.attempts += 1
        self.updates += skipped is None
        self.skipped_nonfinite += skipped == "nonfinite"
        self.skipped_empty += skipped == "empty"

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


@dataclass(frozen=True)
class Attempt:
    """One attempt: what its group came to, and whether it became an update.

    Attributes:
      group: loss, weights, gradient norm before clipping, …
      skipped: "empty" (no weight), "nonfinite", or None for an update.
      learning_rate: of the first parameter group, as used (or as it would have been).
      loss_scale: what the loss was multiplied by during the group's backward passes.
    """

    group: Group
    skipped: Literal["empty", "nonfinite"] | None
    learning_rate: float
    loss_scale: float = 1.0

    @property
    def updated(self) -> bool:
        """Whether the parameters changed."""
        return self.skipped is None


@dataclass
class Run:
    """A finished `train`: every attempt in order, and the counts."""

    attempts: list[Attempt] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


def groups(
    microbatches: Iterable[Any],
    size: int,
    *,
    last: Literal["keep", "drop"] = "keep",
    counts: Counts | None = None,
) -> Iterator[list[Any]]:
    """Cuts a stream (one epoch) into groups of ``size`` microbatches.

    Args:
      microbatches: the stream.
      size: microbatches per group, A.
      last: "keep" yields a short last group, which is divided by its own weight; "drop" reports
        its microbatches in ``counts.dropped_microbatches`` instead.
      counts: needed to drop, since nothing is dropped in silence.

    Raises:
      ValueError: ``size`` below 1, or "drop" without ``counts``.

    >>> [len(group) for group in groups(range(6), 4)]
    [4, 2]
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}: a group has a microbatch or more")
    if last not in ("keep", "drop"):
        raise ValueError(f"last must be 'keep' or 'drop', got {last!r}")
    if last == "drop" and counts is None:
        raise ValueError("last='drop' needs counts: dropped microbatches are reported there")
    return _cut(microbatches, size, None if last == "keep" else counts)


def _cut(microbatches: Iterable[Any], size: int, drop_into: Counts | None) -> Iterator[list[Any]]:
    group: list[Any] = []
    for microbatch in microbatches:
        group.append(microbatch)
        if len(group) == size:
            yield group
            group = []
    if group and drop_into is None:
        yield group
    elif group and drop_into is not None:
        drop_into.dropped_microbatches += len(group)


def update(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    microbatches: Iterable[Any],
    *,
    scheduler: LRScheduler | None = None,
    clip_norm: float | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    counts: Counts | None = None,
    **accumulate_options: Any,
) -> Attempt:
    """One group, one attempt: accumulate, then clip, optimizer and scheduler once, or a skip.

    Args:
      model: trained in place.
      optimizer: over the parameters of ``model``.
      loss_fn: as in `accumulate`.
      microbatches: the group's.
      scheduler: advanced once per update, after the optimizer; a skip does not advance it.
      clip_norm: limit of the norm of the finished gradient.
      on_nonfinite: "skip" leaves parameters, optimizer and scheduler as they were.
      counts: advanced in place.
      **accumulate_options: ``coefficients``, ``denominators``, ``weights_fn``, ``reject``.

    Raises:
      FloatingPointError: the gradient is not finite and ``on_nonfinite`` is "raise"; names the
        first parameter with an inf or NaN.
      ValueError, RuntimeError: as `accumulate`.
    """
    _check_options(clip_norm, on_nonfinite)
    group = accumulate(model, loss_fn, microbatches, **accumulate_options)
    return finish(
        model,
        optimizer,
        group,
        scheduler=scheduler,
        clip_norm=clip_norm,
        on_nonfinite=on_nonfinite,
        counts=counts,
    )


def finish(
    model: nn.Module,
    optimizer: Optimizer,
    group: Group,
    *,
    scheduler: LRScheduler | None = None,
    clip_norm: float | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    counts: Counts | None = None,
) -> Attempt:
    """The end of a group whose gradient stands in ``.grad``: an update, or a skip. As `update`."""
    _check_options(clip_norm, on_nonfinite)
    learning_rate = float(optimizer.param_groups[0]["lr"])
    skipped: Literal["empty", "nonfinite"] | None = None
    if group.empty:
        skipped = "empty"
    elif not math.isfinite(group.grad_norm):
        if on_nonfinite == "raise":
            raise FloatingPointError(
                f"the gradient of {first_nonfinite(model)!r} is not finite (loss {group.loss}): "
                "look at that layer, or pass on_nonfinite='skip'"
            )
        skipped = "nonfinite"
    else:
        if clip_norm is not None:
            clip_gradients(model, clip_norm, group.grad_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    if counts is not None:
        counts.add(group, skipped)
    return Attempt(group, skipped, learning_rate)


def _check_options(clip_norm: float | None, on_nonfinite: str) -> None:
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be above 0, got {clip_norm}: None turns clipping off")
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}")


def train(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    groups: Iterable[Iterable[Any]],
    *,
    counts: Counts | None = None,
    update_fn: Callable[..., Attempt] | None = None,
    after_attempt: Callable[[Attempt], None] | None = None,
    **update_options: Any,
) -> Run:
    """One attempt per group, in order.

    Args:
      model: trained in place.
      optimizer: over the parameters of ``model``.
      loss_fn: as in `accumulate`.
      groups: lists of microbatches, as from `groups`.
      counts: to go on counting; the same object that `groups` drops into. New ones by default.
      update_fn: makes the attempt; `update` by default, or `torch_ref.amp.scaled_update`.
      after_attempt: called after each attempt, when ``.grad`` (clipped) and parameters can be read.
      **update_options: as in ``update_fn`` and `accumulate`.

    >>> import torch
    >>> from torch_ref.losses import Weighted
    >>> model = nn.Linear(1, 1, bias=False)
    >>> def loss_fn(model, x):
    ...     return Weighted(model(x).sum(), torch.tensor(len(x)))
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> run = train(model, sgd, loss_fn, groups(torch.ones(6, 2, 1), 4))
    >>> run.counts.updates, run.counts.examples, run.attempts[1].group.microbatches
    (2, 12, 2)
    """
    run = Run(counts=counts if counts is not None else Counts())
    for group in groups:
        attempt = (update_fn or update)(
            model, optimizer, loss_fn, group, counts=run.counts, **update_options
        )
        run.attempts.append(attempt)
        if after_attempt is not None:
            after_attempt(attempt)
    return run

"""Mixed precision: a loss scale that is constant inside a group, and autocast.

The facts it stands for:

- `scaled_update`: the gradients of a group are added while they carry one and the same scale. It
  is divided out once, before the norm is taken and clipped; the scale moves between groups only.
- `autocast`: narrow types are for the forward pass. Parameters, and so gradients and their sum,
  stay float32, and the backward pass runs outside, as PyTorch asks for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torch_ref._terms import as_terms
from torch_ref.accumulate import LossFn, accumulate
from torch_ref.gradients import clip_gradients, gradient_norm
from torch_ref.losses import Weighted
from torch_ref.train import Attempt, Counts


def autocast(loss_fn: LossFn, dtype: torch.dtype, *, device_type: str = "cpu") -> LossFn:
    """``loss_fn`` computed under autocast, one microbatch at a time.

    Args:
      loss_fn: as in `torch_ref.accumulate.accumulate`.
      dtype: bfloat16, or float16, which wants a loss scale.
      device_type: "cpu" or "cuda".

    >>> from torch_ref.losses import Weighted
    >>> def loss_fn(model, x):
    ...     print(model(x).dtype)
    ...     return Weighted(model(x).float().sum(), torch.tensor(len(x)))
    >>> model = nn.Linear(1, 1)
    >>> group = accumulate(model, autocast(loss_fn, torch.bfloat16), [torch.ones(2, 1)])
    torch.bfloat16
    >>> model.weight.grad.dtype
    torch.float32
    """

    def wrapped(model: Any, microbatch: Any) -> dict[str, Weighted]:
        with torch.autocast(device_type, dtype=dtype):
            return as_terms(loss_fn(model, microbatch))

    return wrapped


def scaled_update(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    microbatches: Iterable[Any],
    *,
    scaler: torch.amp.GradScaler,
    scheduler: LRScheduler | None = None,
    clip_norm: float | None = None,
    counts: Counts | None = None,
    **accumulate_options: Any,
) -> Attempt:
    """One group under a `torch.amp.GradScaler`: unscale, clip, step and update once per attempt.

    A gradient that is not finite is a skip: parameters, optimizer and scheduler stay as they are
    and the scale backs off. A group in which nothing was supervised is a skip too; it says nothing
    about the scale, which neither grows nor backs off.

    Args:
      model: trained in place; its parameters are float32 or wider.
      optimizer: over the parameters of ``model``.
      loss_fn: as in `torch_ref.accumulate.accumulate`, for instance from `autocast`.
      microbatches: the group's.
      scaler: its growth interval counts groups, not microbatches.
      scheduler: advanced once per update.
      clip_norm: limit of the norm of the finished, unscaled gradient.
      counts: advanced in place.
      **accumulate_options: ``coefficients``, ``denominators``, ``weights_fn``.

    Returns:
      `Attempt`; its loss, sums and norm are unscaled, ``loss_scale`` is the group's scale.

    Raises:
      ValueError: a parameter narrower than float32, an option out of range, or as `accumulate`.
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be above 0, got {clip_norm}: None turns clipping off")
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"model has the parameter {name!r} in {parameter.dtype}: keep parameters in "
                "float32 and compute in narrow types with autocast"
            )
    scale = scaler.get_scale()

    def scaled(model: Any, microbatch: Any) -> dict[str, Weighted]:
        terms = as_terms(loss_fn(model, microbatch))
        return {n: Weighted(scaler.scale(t.total), t.weight) for n, t in terms.items()}

    learning_rate = float(optimizer.param_groups[0]["lr"])
    group = accumulate(model, scaled, microbatches, **accumulate_options)
    skipped: Literal["empty", "nonfinite"] | None = "empty" if group.empty else None
    if not group.empty:
        scaler.unscale_(optimizer)
        group = dataclasses.replace(
            group,
            loss=group.loss / scale,
            sums={name: value / scale for name, value in group.sums.items()},
            grad_norm=gradient_norm(model),
        )
        if not math.isfinite(group.grad_norm):
            skipped = "nonfinite"
        elif clip_norm is not None:
            clip_gradients(model, clip_norm, group.grad_norm)
        scaler.step(optimizer)  # leaves the optimizer alone if unscale_ saw an inf or NaN
        scaler.update()
    if skipped is None and scheduler is not None:
        scheduler.step()
    if counts is not None:
        counts.add(group, skipped)
    return Attempt(group, skipped, learning_rate, scale)

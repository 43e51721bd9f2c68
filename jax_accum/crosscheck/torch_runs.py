"""Loops over updates in PyTorch that the built-in model and pairs of somebody's own share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from jax_accum.crosscheck.maps import Arrays
from jax_accum.crosscheck.trace import Trace
from torch_ref.accumulate import accumulate
from torch_ref.gradients import clip_gradients, gradients, parameters
from torch_ref.train import Counts, update

ToJax = Callable[[Arrays], Arrays]
Optimizer = tuple[Any, Any, float | None]
"""Optimizer, scheduler or None, clipping limit or None."""


def by_accumulation(
    module: nn.Module,
    made: Optimizer,
    loss: Callable[..., Any],
    groups: Iterable[Sequence[Any]],
    to_jax: ToJax,
    **options: Any,
) -> tuple[Trace, Counts]:
    """The reference's accumulation loop: an update for each group of microbatches."""
    optimizer, scheduler, clip_norm = made
    counts, trace = Counts(), Trace()
    for microbatches in groups:
        first: Arrays = {}
        if not trace.losses:
            # A run of its own, because an update leaves the gradient clipped.
            accumulate(module, loss, microbatches, **options)
            first = to_jax(gradients(module))
        attempt = update(
            module,
            optimizer,
            loss,
            microbatches,
            scheduler=scheduler,
            clip_norm=clip_norm,
            counts=counts,
            **options,
        )
        after = to_jax(parameters(module))
        trace.add(attempt.group.loss, attempt.group.grad_norm, first, after)
    return trace, counts


def by_gradient(
    module: nn.Module,
    made: Optimizer,
    batches: Iterable[Any],
    gradient: Callable[[Any, Any], tuple[float, Arrays]],
    norm: Callable[[Any, Arrays], float],
    to_jax: ToJax,
) -> Trace:
    """An update for each batch from a gradient computed by itself.

    Args:
      module: is trained.
      made: its optimizer.
      batches: one per update.
      gradient: ``(module, batch)`` to loss and gradient by PyTorch name.
      norm: ``(module, gradient)`` to its norm, before clipping; ``.grad`` holds it then, too.
      to_jax: from PyTorch names and layouts to those of JAX.
    """
    optimizer, scheduler, clip_norm = made
    trace = Trace()
    for batch in batches:
        loss, found = gradient(module, batch)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.from_numpy(found[name])
        size, first = norm(module, found), to_jax(gradients(module))
        if clip_norm is not None:
            clip_gradients(module, clip_norm, size)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        trace.add(loss, size, first, to_jax(parameters(module)))
    return trace

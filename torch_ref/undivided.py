"""The gradient that accumulation must reproduce: the whole batch at once, in float64 if asked.

The fact it stands for: a reference does not share the loop it judges. Nothing here accumulates,
seeds or divides microbatch by microbatch: one forward pass, one loss, one `torch.autograd.grad`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_ref._terms import as_coefficients, as_terms, as_weight
from torch_ref.accumulate import LossFn
from torch_ref.gradients import as_numpy


class Undivided(NamedTuple):
    """Loss, and gradient by parameter name, of a batch that was never divided."""

    loss: float
    gradients: dict[str, np.ndarray]
    weights: dict[str, float]


def undivided(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    coefficients: Mapping[str, float] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> Undivided:
    """Loss and gradient of the whole batch in one pass, ``sum_t c_t S_t / W_t``.

    A term that is defined per microbatch (its weight counts microbatches) sees one microbatch
    here, so it is comparable only where it does not depend on the partition.

    Args:
      model: not changed; a copy is converted and differentiated.
      loss_fn: as in `torch_ref.accumulate.accumulate`.
      batch: all examples of the group, for instance from `concatenate`.
      coefficients: by term, 1 where absent.
      dtype: parameters and floating batch tensors are converted to it; None leaves them.

    Returns:
      `Undivided`; parameters that the loss does not reach have gradient 0.

    >>> from torch_ref.losses import Weighted
    >>> model = nn.Linear(1, 1, bias=False)
    >>> def loss_fn(model, x):
    ...     return Weighted(model(x).sum(), torch.tensor(x.numel()))
    >>> undivided(model, loss_fn, torch.tensor([[1.0], [1], [1], [5]])).gradients["weight"]
    array([[2.]])
    """
    model = copy.deepcopy(model)
    if dtype is not None:
        model = model.to(dtype)
        batch = _map(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
    by_name = {name: p for name, p in model.named_parameters() if p.requires_grad}
    terms = as_terms(loss_fn(model, batch))
    weights = {name: as_weight(name, term.weight) for name, term in terms.items()}
    by_term = as_coefficients(coefficients, list(terms))
    parts = [by_term[n] * terms[n].total / weights[n] for n in terms if weights[n]]
    loss = sum(parts, start=torch.zeros((), dtype=torch.float64))
    found = [torch.zeros_like(p) for p in by_name.values()]
    if loss.requires_grad:
        found = list(torch.autograd.grad(loss, list(by_name.values()), materialize_grads=True))
    by_parameter = {n: as_numpy(g) for n, g in zip(by_name, found, strict=True)}
    return Undivided(loss.item(), by_parameter, weights)


def concatenate(microbatches: Sequence[Any]) -> Any:
    """The undivided batch: microbatches of the same structure joined along the first axis.

    >>> concatenate([{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}])["x"].shape
    torch.Size([3, 3])
    """
    if not len(microbatches):
        raise ValueError("microbatches is empty: there is nothing to concatenate")
    first = microbatches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(microbatches))
    if isinstance(first, Mapping):
        return {key: concatenate([m[key] for m in microbatches]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(concatenate(part) for part in zip(*microbatches, strict=True))
    raise TypeError(
        f"microbatches must be tensors, or dicts, tuples or lists of them, got "
        f"{type(first).__name__}"
    )


def _map(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _map(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_map(function, value) for value in batch)
    return batch

"""A PyTorch accumulation loop by hand, into which mistakes can be planted, and its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from jax_accum.crosscheck import recipe as numbers
from jax_accum.crosscheck.full_data import RowGroup
from jax_accum.crosscheck.full_torch import Setup
from jax_accum.crosscheck.full_torch_model import weights_one
from jax_accum.crosscheck.maps import Arrays
from jax_accum.crosscheck.matrix import FullCase
from jax_accum.crosscheck.trace import COUNTERS, Trace
from torch_ref.gradients import clip_gradients, gradient_norm, gradients, parameters
from torch_ref.losses import Weighted

Gradient = dict[str, Tensor]
Term = tuple[float, int, Gradient]  # mean loss, tokens, gradient of the mean loss


class Loop:
    """A training loop by hand, of which ``mistake`` is the part that goes wrong.

    Args:
      case: of one term.
      weights: initial, by PyTorch name.
      mistake: ``mistake(loop, microbatches)`` trains on a group and returns its loss.
    """

    def __init__(self, case: FullCase, weights: Arrays, mistake: Callable[..., float]) -> None:
        self.case = case
        self.setup = Setup(case, weights)
        self.model, self.optimizer = self.setup.model, self.setup.optimizer
        self.mistake = mistake
        self.loss = self.setup.loss
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.trace = Trace()
        self.norm = 0.0
        self.seen: Arrays = {}

    def run(self, groups: Sequence[RowGroup]) -> Trace:
        """Trains on all groups."""
        for group in groups:
            microbatches = self.setup.microbatches(group)
            self.counts["microbatches"] += len(microbatches)
            self.counts["examples"] += group.rows
            self.counts["tokens"] += group.tokens
            self.counts["attempts"] += 1
            scale = self.setup.scaler.get_scale() if self.setup.scaler else 1.0
            loss = self.mistake(self, microbatches)
            self.trace.add(loss, self.norm, self.seen, parameters(self.model))
            self.trace.scales.append(scale)
        self.trace.counters = self.counts
        return self.trace

    def backward(self, microbatch: Any, weight: float | None = None) -> tuple[float, int]:
        """Adds a gradient to ``.grad``: of the mean loss, or of the sum over ``weight``."""
        (term,) = _terms(self.loss(self.model, microbatch))
        (term.total / (term.weight if weight is None else weight)).backward()
        return float(term.total.detach()), int(term.weight)

    def tokens(self, microbatches: Sequence[Any]) -> int:
        """Supervised tokens of a group, counted before its first forward pass."""
        return sum(int(weights_one(microbatch)) for microbatch in microbatches)

    def terms(self, microbatches: Sequence[Any]) -> list[Term]:
        """Mean loss, tokens and gradient of each microbatch."""
        found = []
        for microbatch in microbatches:
            self.optimizer.zero_grad()
            total, weight = self.backward(microbatch)
            own = {
                n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None
            }
            found.append((total / weight, weight, own))
        return found

    def write(self, gradient: Gradient) -> None:
        """Puts a gradient into ``.grad``."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradient[name].clone()

    def look(self) -> None:
        """Notes the gradient in ``.grad``, as a log would, before it is clipped."""
        self.norm, self.seen = gradient_norm(self.model), gradients(self.model)

    def step(self, *, clip: bool = True, schedule: bool = True) -> None:
        """The optimizer, once, on what stands in ``.grad``."""
        if clip and self.setup.clip_norm is not None:
            clip_gradients(self.model, self.setup.clip_norm, gradient_norm(self.model))
        self.optimizer.step()
        if schedule and self.setup.scheduler is not None:
            self.setup.scheduler.step()
        self.counts["updates"] += 1

    def finish(self, loss: float, gradient: Gradient) -> float:
        """The right end of a group."""
        self.write(gradient)
        self.look()
        self.step()
        return loss


def add_all(gradients: Sequence[Gradient]) -> Gradient:
    """The sum of gradients."""
    first, *rest = gradients
    total = {name: g.clone() for name, g in first.items()}
    for other in rest:
        for name, g in other.items():
            total[name] += g
    return total


def scale(gradient: Gradient, factor: float) -> Gradient:
    """A gradient times a number."""
    return {name: g * factor for name, g in gradient.items()}


def clip(gradient: Gradient) -> Gradient:
    """Clipped to the recipe's norm."""
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradient.values()))
    return scale(gradient, min(1.0, numbers.CLIP_NORM / norm))


def weighted_mean(terms: Sequence[Term]) -> tuple[float, Gradient]:
    """Loss and gradient of all terms' tokens: each weighted by its own, then divided once."""
    weight = sum(tokens for _, tokens, _ in terms)
    loss = sum(loss * tokens for loss, tokens, _ in terms) / weight
    return loss, scale(add_all([scale(g, float(tokens)) for _, tokens, g in terms]), 1 / weight)


def _terms(loss: Any) -> list[Weighted]:
    """The terms of a loss; autocast returns them by name."""
    return [loss] if isinstance(loss, Weighted) else list(loss.values())

"""PyTorch accumulation loops as they are really written, each with one mistake, to be planted.

Every loop sees the microbatches, model and optimizer that the reference sees. `correct` is the same
loop without a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jax_accum.crosscheck import recipe as numbers
from jax_accum.crosscheck.full_data import RowGroup
from jax_accum.crosscheck.full_torch import Setup
from jax_accum.crosscheck.full_torch_model import weights_one
from jax_accum.crosscheck.maps import Arrays
from jax_accum.crosscheck.matrix import FullCase
from jax_accum.crosscheck.trace import COUNTERS, Trace
from torch_ref.gradients import clip_gradients, gradient_norm, gradients, parameters
from torch_ref.losses import Weighted, next_token_cross_entropy

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


def correct(loop: Loop, microbatches: Sequence[Any]) -> float:
    """No mistake: sums weighted by tokens, one division, one update."""
    return loop.finish(*weighted_mean(loop.terms(microbatches)))


def mean_of_means(loop: Loop, microbatches: Sequence[Any]) -> float:
    """``(loss / A).backward()``, the line of most tutorials."""
    terms = loop.terms(microbatches)
    mean = scale(add_all([g for *_, g in terms]), 1 / len(terms))
    return loop.finish(sum(loss for loss, *_ in terms) / len(terms), mean)


def zero_grad_forgotten(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Nobody calls ``zero_grad`` between two groups."""
    before = {n: p.grad for n, p in loop.model.named_parameters() if p.grad is not None}
    before = {name: g.clone() for name, g in before.items()}
    loss, gradient = weighted_mean(loop.terms(microbatches))
    return loop.finish(loss, add_all([before, gradient]) if before else gradient)


def zero_grad_per_microbatch(loop: Loop, microbatches: Sequence[Any]) -> float:
    """``zero_grad`` stands inside the loop over microbatches: the last one alone is left."""
    tokens = loop.tokens(microbatches)
    total = 0.0
    for microbatch in microbatches:
        loop.optimizer.zero_grad()
        total += loop.backward(microbatch, tokens)[0]
    loop.look()
    loop.step()
    return total / tokens


def divided_twice(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Divides by A what was a mean already."""
    loss, gradient = weighted_mean(loop.terms(microbatches))
    return loop.finish(loss, scale(gradient, 1 / loop.case.microbatches))


def not_divided(loop: Loop, microbatches: Sequence[Any]) -> float:
    """``loss.backward()`` of every mean, and no division."""
    terms = loop.terms(microbatches)
    return loop.finish(weighted_mean(terms)[0], add_all([g for *_, g in terms]))


def replica_denominator(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Two replicas divide by their own tokens; DDP then takes the mean of the two."""
    terms = loop.terms(microbatches)
    replicas = [weighted_mean(part) for part in (terms[::2], terms[1::2]) if part]
    gradient = scale(add_all([g for _, g in replicas]), 1 / len(replicas))
    return loop.finish(sum(loss for loss, _ in replicas) / len(replicas), gradient)


def scheduler_per_microbatch(loop: Loop, microbatches: Sequence[Any]) -> float:
    """``scheduler.step()`` stands inside the loop over microbatches."""
    loss, gradient = weighted_mean(loop.terms(microbatches))
    loss = loop.finish(loss, gradient)
    for _ in microbatches[1:]:
        loop.setup.scheduler.step()
    return loss


def clip_per_microbatch(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Clips the gradient of each microbatch before it is added."""
    terms = [(loss, tokens, clip(g)) for loss, tokens, g in loop.terms(microbatches)]
    return loop.finish(*weighted_mean(terms))


def clip_before_dividing(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Clips the sum over microbatches, then divides by A: the limit is A times lower."""
    loss, gradient = weighted_mean(loop.terms(microbatches))
    loop.write(gradient)
    loop.look()
    count = loop.case.microbatches
    loop.write(scale(clip(scale(gradient, float(count))), 1 / count))
    loop.step(clip=False)
    return loss


def update_per_microbatch(loop: Loop, microbatches: Sequence[Any]) -> float:
    """``optimizer.step()`` is indented one level too deep."""
    terms: list[Term] = []
    for microbatch in microbatches:
        terms += loop.terms([microbatch])
        loop.look()
        loop.step()
    return weighted_mean(terms)[0]


def weight_decay_per_microbatch(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Shrinks the weights beside the optimizer, in every pass through the loop."""
    rate = float(loop.optimizer.param_groups[0]["lr"])
    loop.optimizer.param_groups[0]["weight_decay"] = 0.0
    terms: list[Term] = []
    for microbatch in microbatches:
        terms += loop.terms([microbatch])
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(1 - rate * numbers.WEIGHT_DECAY)
    return loop.finish(*weighted_mean(terms))


def partial_divided_by_full(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Divides by the tokens of a full group, guessed from the microbatches that came."""
    loss, gradient = weighted_mean(loop.terms(microbatches))
    return loop.finish(loss, scale(gradient, len(microbatches) / loop.case.microbatches))


def partial_dropped(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Updates on every A-th microbatch alone: what is left over at the end trains nothing."""
    loss, gradient = weighted_mean(loop.terms(microbatches))
    if len(microbatches) == loop.case.microbatches:
        return loop.finish(loss, gradient)
    loop.write(gradient)
    loop.look()
    return loss


def bfloat16_accumulator(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Adds the gradients up in bfloat16, to save memory."""
    terms = loop.terms(microbatches)
    loss, _ = weighted_mean(terms)
    weight = sum(tokens for _, tokens, _ in terms)
    narrow = [{n: (g * (t / weight)).bfloat16() for n, g in own.items()} for _, t, own in terms]
    wide = {name: g.to(terms[0][2][name].dtype) for name, g in add_all(narrow).items()}
    return loop.finish(loss, wide)


def updates_miscounted(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Trains rightly, and counts an update for every microbatch."""
    loss = correct(loop, microbatches)
    loop.counts["updates"] = loop.counts["microbatches"]
    return loss


def ignored_tokens_counted(loop: Loop, microbatches: Sequence[Any]) -> float:
    """A loss that divides by every position, padding included."""

    def loss(model: Any, batch: Any) -> Weighted:
        total, _ = next_token_cross_entropy(
            model(batch["tokens"]), batch["tokens"], mask=batch["mask"]
        )
        return Weighted(total, torch.tensor(batch["tokens"][:, 1:].numel()))

    loop.loss = loss
    return correct(loop, microbatches)


def double_shift(loop: Loop, microbatches: Sequence[Any]) -> float:
    """A loss whose labels were shifted before, and are shifted once more inside."""

    def loss(model: Any, batch: Any) -> Weighted:
        logits = model(batch["tokens"])[:, :-1]
        return next_token_cross_entropy(logits, batch["tokens"][:, 1:], mask=batch["mask"][:, 1:])

    loop.loss = loss
    return correct(loop, microbatches)


def unscale_per_microbatch(loop: Loop, microbatches: Sequence[Any]) -> float:
    """Divides ``.grad`` by the loss scale after every backward pass: earlier ones again and again.

    `torch.amp.GradScaler.unscale_` refuses a second call, and so people divide by hand.
    """
    scaler = loop.setup.scaler
    assert scaler is not None
    factor = scaler.get_scale()
    tokens = loop.tokens(microbatches)
    loop.optimizer.zero_grad()
    total = 0.0
    for microbatch in microbatches:
        total += loop.backward(microbatch, tokens / factor)[0]
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(factor)
    loop.look()
    loop.step()
    return total / tokens


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

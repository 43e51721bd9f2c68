"""PyTorch accumulation loops as they are really written, each with one mistake, to be planted.

Every loop sees the microbatches, model and optimizer that the reference sees. `correct` is the same
loop without a mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jax_accum.crosscheck import recipe as numbers
from jax_accum.crosscheck.torch_hand_loop import Loop, Term, add_all, clip, scale, weighted_mean
from torch_ref.losses import Weighted, next_token_cross_entropy


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

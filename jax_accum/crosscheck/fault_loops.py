"""Accumulation loops as they are really written, each with one mistake, to be planted.

Every loop sees the same microbatches, loss and optimizer as the library does, and returns what a
log of it would show. `correct` is the same loop without a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_accum as ja
from jax_accum.crosscheck import recipe as numbers
from jax_accum.crosscheck.data import Group
from jax_accum.crosscheck.jax_recipe import (
    Batch,
    JaxRecipe,
    LossFn,
    Tree,
    apply_inner,
    mean_gradient,
)
from jax_accum.crosscheck.jax_side import Seen
from jax_accum.crosscheck.trace import COUNTERS

Logits = Callable[[Tree, Any], jax.Array]
Terms = list[tuple[Any, Any, Tree]]  # mean loss, tokens, gradient of each microbatch


@dataclass
class HandWritten:
    """A training loop by hand, of which ``update_group`` is the part that goes wrong.

    ``update_group(loop, params, state, batches)`` returns parameters, state and `Seen`.
    """

    recipe: Any  # a JaxRecipe, or the recipe of the full matrix
    microbatches: int
    microbatch_size: int
    update_group: Callable[..., tuple[Tree, dict[str, Any], Seen]]
    loss: LossFn

    def start(self, params: Tree) -> dict[str, Any]:
        """State of the inner optimizer, what a fault keeps between groups, counters."""
        inner = self.recipe.inner().init(params)
        return {"inner": inner, "kept": None, "counts": dict.fromkeys(COUNTERS, 0)}

    def update(self, params: Tree, state: Any, group: Group) -> tuple[Tree, Any, Seen]:
        """Counts what comes in, and leaves the rest to ``update_group``."""
        batches = list(group.microbatches(self.microbatch_size))
        counts = dict(state["counts"])
        counts["microbatches"] += len(batches)
        counts["examples"] += len(group.examples)
        counts["tokens"] += group.tokens
        counts["attempts"] += 1
        return self.update_group(self, params, {**state, "counts": counts}, batches)

    def counters(self, state: Any) -> dict[str, int]:
        """As the loop counts."""
        return state["counts"]

    def terms(self, params: Tree, batches: Sequence[Batch]) -> Terms:
        """Mean loss, tokens and gradient of the mean loss, of each microbatch."""
        return [
            (loss, tokens, gradient)
            for (loss, tokens), gradient in (mean_gradient(self.loss)(params, b) for b in batches)
        ]

    def finish(
        self, params: Tree, state: Any, loss: Any, gradient: Tree, direction: Any = None
    ) -> tuple[Tree, Any, Seen]:
        """The inner optimizer, once; ``direction`` stands in for it where a fault needs that."""
        seen = Seen(loss, optax.tree.norm(gradient), gradient)
        inner = apply_inner(self.recipe) if direction is None else direction
        params, opt_state = inner(params, state["inner"], gradient)
        counts = state["counts"] | {"updates": state["counts"]["updates"] + 1}
        return params, {**state, "inner": opt_state, "counts": counts}, seen


def correct(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """No mistake: sums weighted by tokens, one division, one update."""
    return loop.finish(params, state, *weighted_mean(loop.terms(params, batches)))


def mean_of_means(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Averages the microbatches' mean losses as if they had the same number of tokens."""
    terms = loop.terms(params, batches)
    gradient = scale(add_all([g for *_, g in terms]), 1 / len(terms))
    return loop.finish(params, state, sum(loss for loss, *_ in terms) / len(terms), gradient)


def no_reset(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Never empties the accumulator when a group begins."""
    loss, gradient = weighted_mean(loop.terms(params, batches))
    if state["kept"] is not None:
        gradient = add_all([state["kept"], gradient])
    return loop.finish(params, {**state, "kept": gradient}, loss, gradient)


def divided_twice(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Divides by A what was a mean already."""
    loss, gradient = weighted_mean(loop.terms(params, batches))
    return loop.finish(params, state, loss, scale(gradient, 1 / loop.microbatches))


def not_divided(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Adds the gradients of the mean losses up and leaves it at that."""
    terms = loop.terms(params, batches)
    loss, _ = weighted_mean(terms)
    return loop.finish(params, state, loss, add_all([g for *_, g in terms]))


def replica_denominator(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Two replicas divide by their own tokens; the all-reduce then takes the mean of the two."""
    terms = loop.terms(params, batches)
    replicas = [weighted_mean(part) for part in (terms[::2], terms[1::2]) if part]
    gradient = scale(add_all([g for _, g in replicas]), 1 / len(replicas))
    loss = sum(loss for loss, _ in replicas) / len(replicas)
    return loop.finish(params, state, loss, gradient)


def schedule_per_microbatch(
    loop: HandWritten, params: Tree, state: Any, batches: list[Batch]
) -> Any:
    """Reads the schedule at the number of microbatches, not of updates."""
    loss, gradient = weighted_mean(loop.terms(params, batches))
    count = state["counts"]["microbatches"] - 1
    direction = partial(_with_rate(loop.recipe, numbers.WEIGHT_DECAY), count)
    return loop.finish(params, state, loss, gradient, direction)


def clip_per_microbatch(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Clips the gradient of each microbatch before it is added."""
    terms = [(loss, tokens, clip(g)) for loss, tokens, g in loop.terms(params, batches)]
    return loop.finish(params, state, *weighted_mean(terms))


def clip_before_dividing(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Clips the sum over microbatches, then divides by A: the limit is A times lower."""
    loss, gradient = weighted_mean(loop.terms(params, batches))
    clipped = clip(scale(gradient, float(loop.microbatches)))
    _, _, seen = loop.finish(params, state, loss, gradient)
    *after, _ = loop.finish(params, state, loss, scale(clipped, 1 / loop.microbatches))
    return (*after, seen)  # what it logs is the gradient before clipping, as all do


def update_per_microbatch(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """The optimizer's call is indented one level too deep."""
    terms: Terms = []
    gradient: Tree = None
    for batch in batches:
        terms += loop.terms(params, [batch])
        loss, _, gradient = terms[-1]
        params, state, _ = loop.finish(params, state, loss, gradient)
    loss, _ = weighted_mean(terms)
    return params, state, Seen(loss, optax.tree.norm(gradient), gradient)


def weight_decay_per_microbatch(
    loop: HandWritten, params: Tree, state: Any, batches: list[Batch]
) -> Any:
    """Shrinks the weights beside the optimizer, in every pass through the loop."""
    update = state["counts"]["updates"]
    keep = 1 - numbers.ADAMW_LEARNING_RATE * numbers.warmup(update) * numbers.WEIGHT_DECAY
    terms: Terms = []
    for batch in batches:
        terms += loop.terms(params, [batch])
        params = scale(params, keep)
    direction = partial(_with_rate(loop.recipe, 0.0), update)
    return loop.finish(params, state, *weighted_mean(terms), direction)


def last_microbatch_only(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Overwrites the gradient instead of adding to it."""
    terms = loop.terms(params, batches)
    loss, _ = weighted_mean(terms)
    return loop.finish(params, state, loss, terms[-1][2])


def partial_divided_by_full(
    loop: HandWritten, params: Tree, state: Any, batches: list[Batch]
) -> Any:
    """Divides by the tokens of a full group, guessed from the microbatches that came."""
    loss, gradient = weighted_mean(loop.terms(params, batches))
    return loop.finish(params, state, loss, scale(gradient, len(batches) / loop.microbatches))


def partial_dropped(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Updates on every A-th microbatch alone: what is left over at the end trains nothing."""
    loss, gradient = weighted_mean(loop.terms(params, batches))
    if len(batches) == loop.microbatches:
        return loop.finish(params, state, loss, gradient)
    return params, state, Seen(loss, optax.tree.norm(gradient), gradient)


def bfloat16_accumulator(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Adds the gradients up in bfloat16, to save memory."""
    terms = loop.terms(params, batches)
    loss, _ = weighted_mean(terms)
    weight = sum(tokens for _, tokens, _ in terms)
    total = jax.tree.map(lambda g: jnp.zeros_like(g, jnp.bfloat16), params)
    for _, tokens, gradient in terms:
        share = scale(gradient, tokens / weight)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, share)
    gradient = jax.tree.map(lambda t, p: t.astype(p.dtype), total, params)
    return loop.finish(params, state, loss, gradient)


def updates_miscounted(loop: HandWritten, params: Tree, state: Any, batches: list[Batch]) -> Any:
    """Trains rightly, and counts an update for every microbatch."""
    params, state, seen = correct(loop, params, state, batches)
    counts = state["counts"] | {"updates": state["counts"]["microbatches"]}
    return params, {**state, "counts": counts}, seen


@cache
def ignored_tokens_counted(logits_of: Logits) -> LossFn:
    """A loss that divides by every position, padding included."""

    def loss(params: Tree, batch: Batch) -> ja.Weighted:
        tokens = batch["tokens"]
        logits = logits_of(params, tokens)
        total, _ = ja.losses.next_token_cross_entropy(logits, tokens, mask=batch["mask"])
        return ja.Weighted(total, jnp.asarray(float(tokens[:, 1:].size)))

    return loss


@cache
def double_shift(logits_of: Logits) -> LossFn:
    """A loss whose labels were shifted before, and are shifted once more inside."""

    def loss(params: Tree, batch: Batch) -> ja.Weighted:
        logits = logits_of(params, batch["tokens"])[:, :-1]
        labels, mask = batch["tokens"][:, 1:], batch["mask"][:, 1:]
        return ja.losses.next_token_cross_entropy(logits, labels, mask=mask)

    return loss


def add_all(trees: list[Tree]) -> Tree:
    """The sum of trees."""
    return jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *trees)


def scale(tree: Tree, factor: Any) -> Tree:
    """A tree times a number, leaf dtypes kept."""
    return jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), tree)


def clip(gradient: Tree) -> Tree:
    """Clipped to the recipe's norm."""
    limit = optax.clip_by_global_norm(numbers.CLIP_NORM)
    return limit.update(gradient, limit.init(gradient))[0]


def weighted_mean(terms: Terms) -> tuple[Any, Tree]:
    """Loss and gradient of all terms' tokens: each weighted by its own, then divided once."""
    weight = sum(tokens for _, tokens, _ in terms)
    loss = sum(loss * tokens for loss, tokens, _ in terms) / weight
    return loss, scale(add_all([scale(g, tokens) for _, tokens, g in terms]), 1 / weight)


@cache
def _with_rate(recipe: JaxRecipe, weight_decay: float) -> Callable[..., Any]:
    """An update that is told at which count to read the schedule."""
    direction = recipe.direction(weight_decay)

    @jax.jit
    def apply(count: Any, params: Tree, state: Any, gradient: Tree) -> tuple[Tree, Any]:
        updates, inner = direction.update(gradient, state[1], params)
        updates = scale(updates, -recipe.schedule(count))
        return optax.apply_updates(params, updates), (state[0], inner, state[2])

    return apply

"""The cross-check's recipe in JAX: the loss of a microbatch, and the optimizer with a tap on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jax_accum as ja
from jax_accum.crosscheck import recipe
from jax_accum.crosscheck.gpt import GPT, GPTSizes

Batch = dict[str, Any]
Tree = Any
LossFn = Callable[[Tree, Batch], ja.Weighted]


class TapState(NamedTuple):
    """The last gradient that went through a `tap`."""

    gradient: Tree


def tap() -> optax.GradientTransformation:
    """Lets gradients through and keeps the last: what the inner optimizer was really given."""

    def update(updates: Tree, state: TapState, params: Tree = None) -> tuple[Tree, TapState]:
        del state, params
        return updates, TapState(updates)

    return optax.GradientTransformation(lambda p: TapState(jax.tree.map(jnp.zeros_like, p)), update)


def tapped(state: Tree) -> Tree:
    """The gradient that a `tap` anywhere in an optimizer state holds."""
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, TapState))
    return next(node.gradient for node in found if isinstance(node, TapState))


@cache
def logits_function(sizes: GPTSizes) -> Callable[[Tree, Any], jax.Array]:
    """The model as a pure function: ``(params, tokens [B, T]) -> logits [B, T, V]``."""
    model = GPT(sizes)

    def logits(params: Tree, tokens_BxT: Any) -> jax.Array:
        return jnp.asarray(model.apply({"params": params}, tokens_BxT))

    return logits


@cache
def loss_function(sizes: GPTSizes) -> LossFn:
    """The loss that the ways differentiate: summed cross entropy, and the supervised tokens."""
    logits = logits_function(sizes)

    def loss(params: Tree, batch: Batch) -> ja.Weighted:
        tokens_BxT = batch["tokens"]
        return ja.losses.next_token_cross_entropy(
            logits(params, tokens_BxT), tokens_BxT, mask=batch["mask"]
        )

    return loss


class InnerOptimizer:
    """The optimizers that the recipes of all checks share, by the name in ``optimizer``."""

    optimizer: str

    def schedule(self, count: Any) -> Any:
        """Learning rate at an update (a traced int32, from 0)."""
        if self.optimizer == "adamw":
            # count + 1.0, not + 1: an int32 divided by an int is float32 even in 64-bit mode.
            share = jnp.minimum(1.0, (count + 1.0) / recipe.WARMUP_UPDATES)
            return recipe.ADAMW_LEARNING_RATE * share
        rates = {"sgd": recipe.SGD_LEARNING_RATE, "adafactor": recipe.ADAFACTOR_LEARNING_RATE}
        return rates[self.optimizer]

    def direction(self, weight_decay: float = recipe.WEIGHT_DECAY) -> optax.GradientTransformation:
        """Everything but the learning rate: clipping, Adam, decoupled weight decay."""
        b1, b2 = recipe.ADAMW_BETAS
        return optax.chain(
            optax.clip_by_global_norm(recipe.CLIP_NORM),
            optax.scale_by_adam(b1, b2, eps=recipe.ADAMW_EPS),
            optax.add_decayed_weights(weight_decay),
        )

    def inner(self) -> optax.GradientTransformation:
        """The optimizer that a group's gradient is given to, once."""
        rate = optax.scale_by_learning_rate(self.schedule)
        return optax.chain(tap(), self.direction(), rate)


@dataclass(frozen=True)
class JaxRecipe(InnerOptimizer):
    """Loss and optimizer of a run. Hashable: equal recipes share what they compile.

    Args:
      sizes: of the model.
      optimizer: ``sgd`` or ``adamw``.
    """

    sizes: GPTSizes
    optimizer: str

    @property
    def loss(self) -> LossFn:
        """The loss of a microbatch."""
        return loss_function(self.sizes)

    def direction(self, weight_decay: float = recipe.WEIGHT_DECAY) -> optax.GradientTransformation:
        """Everything but the learning rate; of SGD nothing."""
        return optax.identity() if self.optimizer == "sgd" else super().direction(weight_decay)


@cache
def mean_gradient(loss: LossFn) -> Callable[..., Any]:
    """Jitted: ``((mean loss, weight), gradient of the mean loss)`` of one microbatch."""

    def mean(params: Tree, batch: Batch) -> tuple[Any, Any]:
        term = loss(params, batch)
        return term.total / term.weight, term.weight

    return jax.jit(jax.value_and_grad(mean, has_aux=True))


@cache
def apply_inner(recipe: InnerOptimizer) -> Callable[..., Any]:
    """Jitted: one update of the inner optimizer; returns parameters and state."""
    inner = recipe.inner()

    @jax.jit
    def apply(params: Tree, state: Tree, gradient: Tree) -> tuple[Tree, Tree]:
        updates, state = inner.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return apply

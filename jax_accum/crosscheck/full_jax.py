"""The full matrix in JAX: its small model, its losses, its optimizers, the undivided gradient.

Shape legend: B rows, T positions, C width of a token, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_accum as ja
from jax_accum.crosscheck import recipe as numbers
from jax_accum.crosscheck.full_data import (
    COEFFICIENTS,
    GROWTH_INTERVAL,
    INITIAL_SCALE,
)
from jax_accum.crosscheck.jax_recipe import InnerOptimizer

Tree = Any
Batch = Mapping[str, Any]
LossFn = Callable[..., Any]

VOCABULARY, WIDTH, HIDDEN = 256, 8, 16
SHAPES = {
    "tok_emb/embedding": (VOCABULARY, WIDTH),
    "mix/kernel": (2 * WIDTH, HIDDEN),
    "mix/bias": (HIDDEN,),
    "norm/scale": (HIDDEN,),
    "norm/bias": (HIDDEN,),
    "head/kernel": (HIDDEN, VOCABULARY),
}
EPS = 1e-5


def logits_function(params: Tree, tokens_BxT: Any) -> jax.Array:
    """``[B, T]`` to ``[B, T, V]``: each token and the one before it, a hidden layer, a norm.

    No parameter has a gradient that is 0 by symmetry: an optimizer that divides by the size of
    the gradient would turn its rounding into updates.
    """
    x_BxTxC = params["tok_emb"]["embedding"][tokens_BxT]
    before_BxTxC = jnp.pad(x_BxTxC, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    both = jnp.concatenate([x_BxTxC, before_BxTxC], axis=-1)
    h_BxTxH = jax.nn.gelu(both @ params["mix"]["kernel"] + params["mix"]["bias"], approximate=True)
    mean = h_BxTxH.mean(-1, keepdims=True)
    variance = jnp.square(h_BxTxH - mean).mean(-1, keepdims=True)
    h_BxTxH = (h_BxTxH - mean) * jax.lax.rsqrt(variance + EPS)
    h_BxTxH = h_BxTxH * params["norm"]["scale"] + params["norm"]["bias"]
    return h_BxTxH @ params["head"]["kernel"]


@cache
def loss_function(terms: str, dtype: str) -> LossFn:
    """The loss of a microbatch, as ``loss(params, batch)``.

    Args:
      terms: ``one``, the cross entropy by supervised tokens; ``three``, with two more terms, one
        by sequences and one by positions.
      dtype: narrow ones are for the model alone: parameters are cast on the way in, and the loss
        is computed in float32.
    """
    narrow = dtype if dtype in ("bfloat16", "float16") else None

    def loss(params: Tree, batch: Batch) -> Any:
        if narrow is not None:
            params = jax.tree.map(lambda p: p.astype(narrow), params)
        tokens, mask, boost = batch["tokens"], batch["mask"], jnp.max(batch["boost"])
        logits = logits_function(params, tokens)
        first = ja.losses.next_token_cross_entropy(logits, tokens, mask=mask)
        first = ja.Weighted(first.total * boost, first.weight)
        if terms == "one":
            return first
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        some = mask.any(axis=1)
        length = jnp.where(some, mask.sum(axis=1), 1)
        pooled_BxV = jnp.where(mask[..., None], logits, 0).sum(axis=1) / length[:, None]
        per_row = jnp.where(some, jnp.square(pooled_BxV).mean(axis=-1), 0)
        z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return {
            "tokens": first,
            "sequences": ja.Weighted(per_row.sum(), some.sum()),
            "positions": ja.Weighted(jnp.where(mask, z, 0).sum(), mask.sum()),
        }

    return loss


@dataclass(frozen=True)
class Recipe(InnerOptimizer):
    """Loss and optimizer of a run. Hashable: equal recipes share what they compile.

    Args:
      loss: as `accumulated_value_and_grad` takes it.
      optimizer: ``sgd``, ``adamw`` or ``adafactor``.
      scaled: under a dynamic loss scale.
      coefficients: by term, as items; empty for a loss of one term.
    """

    loss: LossFn
    optimizer: str
    scaled: bool = False
    coefficients: tuple[tuple[str, float], ...] = ()

    def direction(self, weight_decay: float = numbers.WEIGHT_DECAY) -> optax.GradientTransformation:
        """Everything but the learning rate; SGD has momentum here."""
        if self.optimizer == "sgd":
            return optax.trace(numbers.MOMENTUM)
        if self.optimizer == "adafactor":
            return optax.chain(
                optax.scale_by_factored_rms(
                    min_dim_size_to_factor=1,
                    decay_rate=numbers.ADAFACTOR_DECAY,
                    epsilon=numbers.ADAFACTOR_EPS**2,
                    # Optax's own is float32 even in 64-bit mode.
                    decay_rate_fn=lambda count, power: 1.0 - (count + 1.0) ** -power,
                ),
                optax.clip_by_block_rms(1.0),
                optax.scale_by_param_block_rms(numbers.ADAFACTOR_MIN_RMS),
            )
        return super().direction(weight_decay)

    @property
    def first(self) -> str:
        """Name of the term whose weight is the supervised tokens."""
        return self.coefficients[0][0] if self.coefficients else "loss"

    def guarded(self) -> Any:
        """The same behind a `guard`, with the loss scale if there is one."""
        scale = ja.DynamicLossScale(INITIAL_SCALE, GROWTH_INTERVAL) if self.scaled else None
        return ja.guard(self.inner(), loss_scale=scale)

    def scale_of(self, state: Any) -> Any:
        """What the loss is multiplied by in the present group."""
        return ja.loss_scale(state) if self.scaled else 1.0


def case_recipe(optimizer: str, dtype: str, terms: str) -> Recipe:
    """The recipe of a case of the full matrix."""
    several = tuple(COEFFICIENTS.items()) if terms == "three" else ()
    return Recipe(loss_function(terms, dtype), optimizer, dtype == "float16", several)


def terms_of(loss: Any) -> dict[str, ja.Weighted]:
    """Terms by name; a single one is called ``loss``."""
    return loss if isinstance(loss, dict) else {"loss": loss}


@cache
def whole_gradient(recipe: Recipe) -> Callable[..., Any]:
    """Jitted ``(params, batch, scale) -> (loss, gradient)`` of an undivided batch."""
    by_term = dict(recipe.coefficients)

    def value(params: Tree, batch: Batch, scale: Any) -> tuple[Any, Any]:
        terms = terms_of(recipe.loss(params, batch))
        loss = sum(by_term.get(name, 1.0) * t.total / t.weight for name, t in terms.items())
        return loss * scale, loss

    @jax.jit
    def run(params: Tree, batch: Batch, scale: Any) -> tuple[Any, Tree]:
        (_, loss), gradient = jax.value_and_grad(value, has_aux=True)(params, batch, scale)
        return loss, jax.tree.map(lambda g: g / scale, gradient)

    return run

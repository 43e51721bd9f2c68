"""Preset models for planning: the small GPT at three sizes, trained with AdamW.

A preset is a `make` for `largest_microbatch`, with shapes in the place of arrays:
nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_accum import losses
from jax_accum._plan import BatchPlan
from jax_accum._train_step import make_train_step
from jax_accum._weighted import Weighted
from jax_accum.crosscheck.gpt import GPT, GPTSizes

PRESETS = {
    "gpt-tiny": GPTSizes(vocab_size=256, max_length=64, layers=1, heads=2, width=32),
    "gpt-small": GPTSizes(vocab_size=256, max_length=128, layers=2, heads=4, width=64),
    "gpt-medium": GPTSizes(vocab_size=8192, max_length=128, layers=4, heads=4, width=128),
}


def preset(sizes: GPTSizes, examples: int) -> Callable[[BatchPlan], tuple[Any, tuple[Any, ...]]]:
    """`make(plan)` for a GPT of these sizes and rows of its full length.

    Args:
      sizes: of the model; tokens of an example are `max_length`.
      examples: per update.
    """
    model, tx = GPT(sizes), optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct((examples, sizes.max_length), jnp.int32)
    one = jax.ShapeDtypeStruct((1, sizes.max_length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), one)["params"]
    batch = {"tokens": tokens, "mask": jax.ShapeDtypeStruct(tokens.shape, jnp.bool_)}

    def loss_fn(params: Any, batch: Any) -> Weighted:
        logits = model.apply({"params": params}, batch["tokens"])
        assert isinstance(logits, jax.Array)
        return losses.next_token_cross_entropy(logits, batch["tokens"], mask=batch["mask"])

    def make(plan: BatchPlan) -> tuple[Any, tuple[Any, ...]]:
        step = make_train_step(loss_fn, tx, plan.microbatches)
        return step, (params, jax.eval_shape(tx.init, params), batch)

    return make

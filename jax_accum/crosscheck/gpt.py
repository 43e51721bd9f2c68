"""The small GPT in Flax Linen: the twin of the PyTorch reference's model, by the same arithmetic.

Linen rather than NNX, because its ``apply`` is already what the core differentiates: a pure
function of a plain parameter dictionary. An NNX module would have to be split into graph and
state on the way in and merged again inside every loss.

Shape legend: B rows, T positions, V vocabulary, C width, H heads, D width of one head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class GPTSizes:
    """Sizes of both models: vocabulary, longest row, layers, heads, width, MLP's multiple of it."""

    vocab_size: int = 256
    max_length: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64
    mlp_ratio: int = 4


def _layer_norm(name: str) -> nn.LayerNorm:
    # The fast variance, mean of squares less square of mean, cancels: PyTorch does not use it.
    return nn.LayerNorm(epsilon=LAYER_NORM_EPS, use_fast_variance=False, name=name)


class Dense(nn.Dense):
    """A dense layer that multiplies one matrix ``[B * T, C]``, whatever the shape of its input.

    The gradient of the kernel sums over B and T. Where these are two axes, XLA on a CPU first
    writes the gradient of the output a second time, transposed, and computes once more what led to
    it; where they are one axis, the product reads it as it lies.
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``[..., C]`` to ``[..., features]``."""
        rows = super().__call__(inputs.reshape(-1, inputs.shape[-1]))
        return rows.reshape(*inputs.shape[:-1], self.features)


class Attention(nn.Module):
    """Causal self-attention, written out. Padding ends a row, so no target ever sees it."""

    sizes: GPTSizes

    @nn.compact
    def __call__(self, x_BxTxC: jax.Array) -> jax.Array:
        """``[B, T, C]`` to ``[B, T, C]``."""
        rows, length, width = x_BxTxC.shape
        split = (rows, length, self.sizes.heads, width // self.sizes.heads)
        q_BxTxHxD = Dense(width, name="q")(x_BxTxC).reshape(split)
        k_BxTxHxD = Dense(width, name="k")(x_BxTxC).reshape(split)
        v_BxTxHxD = Dense(width, name="v")(x_BxTxC).reshape(split)
        scores_BxHxTxT = jnp.einsum("bqhd,bkhd->bhqk", q_BxTxHxD, k_BxTxHxD) / math.sqrt(split[-1])
        seen_TxT = jnp.tril(jnp.ones((length, length), bool))
        scores_BxHxTxT = jnp.where(seen_TxT, scores_BxHxTxT, -jnp.inf)
        attention_BxHxTxT = jax.nn.softmax(scores_BxHxTxT, axis=-1)
        mixed_BxTxHxD = jnp.einsum("bhqk,bkhd->bqhd", attention_BxHxTxT, v_BxTxHxD)
        return Dense(width, name="o")(mixed_BxTxHxD.reshape(rows, length, width))


class MLP(nn.Module):
    """Up, GELU (the tanh approximation), down."""

    sizes: GPTSizes

    @nn.compact
    def __call__(self, x_BxTxC: jax.Array) -> jax.Array:
        """``[B, T, C]`` to ``[B, T, C]``."""
        hidden = Dense(self.sizes.mlp_ratio * self.sizes.width, name="up")(x_BxTxC)
        return Dense(self.sizes.width, name="down")(nn.gelu(hidden, approximate=True))


class Block(nn.Module):
    """One pre-LN block: each half reads a normalised copy and adds to the residual stream."""

    sizes: GPTSizes

    @nn.compact
    def __call__(self, x_BxTxC: jax.Array) -> jax.Array:
        """``[B, T, C]`` to ``[B, T, C]``."""
        x_BxTxC = x_BxTxC + Attention(self.sizes, name="attn")(_layer_norm("ln1")(x_BxTxC))
        return x_BxTxC + MLP(self.sizes, name="mlp")(_layer_norm("ln2")(x_BxTxC))


class GPT(nn.Module):
    """Token and position embeddings, pre-LN blocks, final LayerNorm, untied head without bias.

    Activations have the dtype of the parameters.

    >>> model = GPT(GPTSizes(layers=1, width=8, heads=2, max_length=5))
    >>> tokens = jnp.zeros((3, 5), jnp.int32)
    >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
    (3, 5, 256)
    """

    sizes: GPTSizes

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Integer tokens ``[B, T]`` to logits ``[B, T, V]``."""
        sizes = self.sizes
        positions_T = jnp.arange(tokens_BxT.shape[1])
        x_BxTxC = nn.Embed(sizes.vocab_size, sizes.width, name="tok_emb")(tokens_BxT)
        x_BxTxC = x_BxTxC + nn.Embed(sizes.max_length, sizes.width, name="pos_emb")(positions_T)
        for i in range(sizes.layers):
            x_BxTxC = Block(sizes, name=f"blocks_{i}")(x_BxTxC)
        x_BxTxC = _layer_norm("ln_f")(x_BxTxC)
        return Dense(sizes.vocab_size, use_bias=False, name="head")(x_BxTxC)


def parameter_shapes(sizes: GPTSizes) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters by path, such as ``blocks_0/attn/q/kernel``; nothing is computed."""
    tokens = jax.ShapeDtypeStruct((1, sizes.max_length), jnp.int32)
    tree = jax.eval_shape(GPT(sizes).init, jax.random.key(0), tokens)["params"]
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}

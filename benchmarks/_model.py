"""A small transformer in plain JAX, its layers unrolled or scanned, checkpointed or not.

Shapes, one letter an axis: B rows, T tokens, V vocabulary, C width, N heads, H width of a head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

import jax_accum as ja

Tree = Any


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes, and how the layers are run."""

    vocabulary: int = 512
    length: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    scanned: bool = False
    checkpointed: bool = False

    def init(self, seed: int = 0, dtype: Any = jnp.float32) -> Tree:
        """Random parameters; the layers stacked along a leading axis where they are scanned."""
        keys = iter(jax.random.split(jax.random.key(seed), 4 * self.layers + 3))

        def matrix(n: int, m: int) -> jax.Array:
            return (jax.random.normal(next(keys), (n, m)) / math.sqrt(n)).astype(dtype)

        c = self.width
        layers = [
            {
                "qkv": matrix(c, 3 * c),
                "out": matrix(c, c),
                "up": matrix(c, 4 * c),
                "down": matrix(4 * c, c),
                "norm1": jnp.ones(c, dtype),
                "norm2": jnp.ones(c, dtype),
            }
            for _ in range(self.layers)
        ]
        return {
            "tokens": matrix(self.vocabulary, c),
            "positions": matrix(self.length, c),
            "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers) if self.scanned else layers,
            "head": matrix(c, self.vocabulary),
        }

    def logits(self, params: Tree, tokens_BxT: jax.Array) -> jax.Array:
        """`[B, T, V]`, of rows of the full length."""
        return self.hidden(params, tokens_BxT) @ params["head"]

    def hidden(self, params: Tree, tokens_BxT: jax.Array) -> jax.Array:
        """`[B, T, C]`, what the head sees."""
        x_BxTxC = params["tokens"][tokens_BxT] + params["positions"]
        layer = jax.checkpoint(self._layer) if self.checkpointed else self._layer
        if self.scanned:
            x_BxTxC, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x_BxTxC, params["layers"])
        else:
            for p in params["layers"]:
                x_BxTxC = layer(x_BxTxC, p)
        return x_BxTxC

    def _layer(self, x_BxTxC: jax.Array, p: Tree) -> jax.Array:
        b, t, c = x_BxTxC.shape
        qkv = (_norm(x_BxTxC, p["norm1"]) @ p["qkv"]).reshape(b, t, 3, self.heads, -1)
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, is_causal=True)
        x_BxTxC = x_BxTxC + mixed.reshape(b, t, c) @ p["out"]
        hidden = jax.nn.gelu(_norm(x_BxTxC, p["norm2"]) @ p["up"])
        return x_BxTxC + hidden @ p["down"]

    def loss(self, params: Tree, batch: Tree) -> ja.Weighted:
        """Next-token cross entropy over the supervised tokens."""
        return ja.losses.next_token_cross_entropy(
            self.logits(params, batch["tokens"]), batch["tokens"], mask=batch["mask"]
        )

    def chunked_loss(self, params: Tree, batch: Tree) -> ja.Weighted:
        """The same, its logits in 8 chunks over the sequence."""
        hidden = self.hidden(params, batch["tokens"])
        return ja.losses.chunked_next_token_cross_entropy(
            hidden, params["head"], batch["tokens"], chunks=8, mask=batch["mask"]
        )

    def batch(self, rows: int, seed: int = 0) -> Tree:
        """Random tokens; rows of differing length."""
        tokens, lengths = jax.random.split(jax.random.key(seed))
        n = jax.random.randint(lengths, (rows, 1), self.length // 4, self.length + 1)
        return {
            "tokens": jax.random.randint(tokens, (rows, self.length), 0, self.vocabulary),
            "mask": jnp.arange(self.length) < n,
        }

    def flops(self, rows: int) -> float:
        """Of one update over `rows` rows: 6 per parameter in a matrix product and token."""
        per_layer = 12 * self.width**2
        matrices = self.layers * per_layer + self.width * self.vocabulary
        attention = self.layers * 2 * self.length * self.width
        return 6 * rows * self.length * (matrices + attention)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale

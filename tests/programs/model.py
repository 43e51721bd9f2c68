"""A model with embedding, attention and layer norm, and a loss of two terms; and its oracle.

Sizes: N rows, T tokens in a row, V vocabulary, E width.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jax_accum as ja

T, V, E = 6, 11, 8
COEFFICIENTS = {"labels": 1.0, "rows": 0.3}


def init(dtype=np.float32):
    """Parameters, drawn once."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(dtype)  # noqa: E731
    return {
        "embedding": draw(V, E),
        "qkv": draw(E, 3 * E),
        "out": draw(E, E),
        "scale": np.ones(E, dtype),
        "shift": np.zeros(E, dtype),
        "head": draw(E, V),
    }


def rows(n, seed=1):
    """`n` rows; tokens repeat, a third of the labels are not supervised, one row has none."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (n, T)).astype(np.int32)
    labels = rng.integers(0, V, (n, T)).astype(np.int32)
    labels[rng.random((n, T)) < 0.35] = -100
    labels[n // 2] = -100
    return {"tokens": tokens, "labels": labels, "counts": np.ones(n, bool)}


def padded(batch, n):
    """The batch with copies of its first row behind it, which weigh nothing."""
    more = n - len(batch["counts"])
    copies = jax.tree.map(lambda x: np.repeat(x[:1], more, axis=0), batch)
    copies = copies | {"labels": np.full((more, T), -100, np.int32), "counts": np.zeros(more, bool)}
    return jax.tree.map(lambda x, y: np.concatenate([x, y]), batch, copies)


def logits_of(params, tokens):
    """`[N, T]` tokens to `[N, T, V]` logits and `[N, T, E]` hidden states."""
    x = jnp.asarray(params["embedding"])[tokens]
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    scores = jnp.einsum("nte,nse->nts", q, k) / np.sqrt(E).astype(x.dtype)
    causal = np.tril(np.ones((T, T), bool))
    x = x + jax.nn.softmax(jnp.where(causal, scores, -1e30)) @ v @ params["out"]
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["scale"] + params["shift"]
    return x @ params["head"], x


def loss_fn(params, batch):
    """Cross entropy by supervised labels; a penalty by rows."""
    logits, x = logits_of(params, batch["tokens"])
    penalty = jnp.where(batch["counts"], (x.mean(1) ** 4).sum(-1), 0)
    return {
        "labels": ja.losses.softmax_cross_entropy(logits, batch["labels"]),
        "rows": ja.Weighted(penalty.sum(), batch["counts"].sum()),
    }


def undivided(params, batch):
    """The loss of the whole batch as one number, without this library."""
    logits, x = logits_of(params, batch["tokens"])
    log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    some = batch["labels"] >= 0
    label = jnp.where(some, batch["labels"], 0)[..., None]
    picked = jnp.take_along_axis(log_p, label, -1)[..., 0]
    n = jnp.maximum(batch["counts"].sum(), 1).astype(logits.dtype)
    by_rows = jnp.where(batch["counts"], (x.mean(1) ** 4).sum(-1), 0).sum() / n
    return -jnp.where(some, picked, 0).sum() / some.sum().astype(logits.dtype) + 0.3 * by_rows


def distance(got, want):
    """Relative L2 distance over the tree, computed in float64."""
    flat = lambda tree: np.concatenate(  # noqa: E731
        [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    )
    return float(np.linalg.norm(flat(got) - flat(want)) / np.linalg.norm(flat(want)))

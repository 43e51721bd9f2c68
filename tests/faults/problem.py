"""The problem all faults are shown on: a tagger of sequences, with ignored labels.

Shapes: m rows, T positions, F features, H hidden units, V tags. A batch is `{"x": (m, T, F)
float32, "labels": (m, T) int32}`, where label -100 is not supervised.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_accum as ja
from jax_accum.doctor import Case, Recipe

F, H, V, T = 4, 5, 4, 6
A, M = 4, 2
RATE = 0.5
SGD = Recipe("sgd", learning_rate=RATE)


def logits_of(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_fn(params, batch):
    """Cross entropy summed over supervised positions, and how many they are."""
    return ja.losses.softmax_cross_entropy(logits_of(params, batch["x"]), batch["labels"])


def mean_loss(params, batch):
    """What most people write: the mean over supervised positions of this microbatch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits_of(params, batch["x"]), jnp.maximum(batch["labels"], 0)
    )
    told = batch["labels"] != -100
    return jnp.sum(jnp.where(told, losses, 0)) / jnp.maximum(jnp.sum(told), 1)


def sum_loss(params, batch):
    return loss_fn(params, batch).total


def tokens_in(batch):
    return jnp.sum(batch["labels"] != -100)


def draw_params(seed, dtype=np.float32):
    rng = np.random.default_rng(1000 + seed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32).astype(dtype) * dtype(0.5)

    return {"w1": draw(F, H), "b1": draw(H), "w2": draw(H, V), "b2": draw(V)}


def draw_examples(seed, count=24):
    """Rows of 2 to T supervised positions; the tail is padding."""
    rng = np.random.default_rng(2000 + seed)
    examples = []
    for _ in range(count):
        labels = rng.integers(0, V, T).astype(np.int32)
        labels[rng.integers(1, T + 1) :] = -100
        examples.append({"x": rng.normal(size=(T, F)).astype(np.float32), "labels": labels})
    return examples


def make_case(seed, **changes):
    dtype = changes.pop("dtype", np.float32)
    settings = {
        "loss_fn": loss_fn,
        "recipe": SGD,
        "microbatches": A,
        "microbatch_size": M,
        "labels": "labels",
        "seed": seed,
    }
    return Case(
        params=draw_params(seed, dtype), examples=draw_examples(seed), **{**settings, **changes}
    )


def add(a, b):
    return b if a is None else jax.tree.map(jnp.add, a, b)


def times(tree, factor):
    return jax.tree.map(lambda g: g * factor, tree)


grad_of_mean = jax.jit(jax.grad(mean_loss))
grad_of_sum = jax.jit(jax.grad(sum_loss))
count_tokens = jax.jit(tokens_in)


def stacked(microbatches):
    return jax.tree.map(lambda *x: np.stack(x), *microbatches)


@functools.cache
def jitted(tx):
    """`apply(params, state, grads)` of an Optax transformation, compiled once."""

    @jax.jit
    def apply(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return apply


def right_gradient(params, microbatches):
    """Sums over the group, divided once; None if nothing is supervised."""
    grads, tokens = None, 0
    for batch in microbatches:
        grads = add(grads, grad_of_sum(params, batch))
        tokens += int(count_tokens(batch))
    return times(grads, 1 / tokens) if tokens else None


def by_replica(microbatches, replicas):
    """Trees with leading axes (replica, microbatch)."""
    whole = stacked(microbatches)

    def split(x):
        a, rows, *rest = x.shape
        return np.moveaxis(x.reshape(a, replicas, rows // replicas, *rest), 1, 0)

    return jax.tree.map(split, whole)


def two_terms(params, batch):
    """Cross entropy by token, and a penalty on the logits by sequence."""
    logits = logits_of(params, batch["x"])
    told = jnp.any(batch["labels"] != -100, axis=-1)
    penalty = jnp.sum(jnp.where(told, jnp.mean(logits**2, axis=(1, 2)), 0))
    return {"tokens": loss_fn(params, batch), "sequences": ja.Weighted(penalty, jnp.sum(told))}


@jax.jit
@jax.grad
def dropout_grad(params, batch, key):
    """Gradient of the summed loss with a quarter of the features dropped."""
    kept = jax.random.bernoulli(key, 0.75, batch["x"].shape)
    return sum_loss(params, batch | {"x": jnp.where(kept, batch["x"] / 0.75, 0)})

"""Gradients are added up in bfloat16, to save memory."""

import jax
import jax.numpy as jnp
import optax

from tests.faults import problem as p

FAULT = "accumulator of too little precision"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    total = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.bfloat16), params)
    tokens = sum(int(p.count_tokens(batch)) for batch in microbatches)
    for batch in microbatches:
        share = p.times(p.grad_of_sum(params, batch), 1 / tokens)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, share)
    grads = jax.tree.map(lambda t: t.astype(jnp.float32), total)
    return p.jitted(tx)(params, state, grads)

"""The accumulator is emptied by multiplying with zero, which an inf survives as NaN."""

import jax
import jax.numpy as jnp
import optax

from tests.faults import problem as p

FAULT = "poisoned by a non-finite gradient"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(
        seed, init=lambda params: (tx.init(params), p.times(params, 0.0)), examine=["nonfinite"]
    )


def update(params, state, microbatches):
    inner, acc = state
    tokens = 0
    for batch in microbatches:
        acc = p.add(acc, p.grad_of_sum(params, batch))
        tokens += int(p.count_tokens(batch))
    grads = p.times(acc, 1 / tokens)
    if all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads)):
        params, inner = p.jitted(tx)(params, inner, grads)
    return params, (inner, p.times(acc, 0.0))

"""The features are normalised by the mean and variance of the microbatch."""

import jax
import jax.numpy as jnp
import optax

from tests.faults import problem as p

FAULT = "batch statistics"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init, loss_fn=loss_fn)


def loss_fn(params, batch):
    x = batch["x"]
    mean, variance = jnp.mean(x, (0, 1)), jnp.var(x, (0, 1))
    return p.loss_fn(params, batch | {"x": (x - mean) / jnp.sqrt(variance + 1e-5)})


grad_of_sum = jax.jit(jax.grad(lambda params, batch: loss_fn(params, batch).total))


def update(params, state, microbatches):
    grads, tokens = None, 0
    for batch in microbatches:
        if own := int(p.count_tokens(batch)):
            grads, tokens = p.add(grads, grad_of_sum(params, batch)), tokens + own
    if not tokens:
        return params, state
    return p.jitted(tx)(params, state, p.times(grads, 1 / tokens))

"""The weight of each token is 0 / 0 in a microbatch of padding, and 0 times NaN is NaN."""

import jax
import jax.numpy as jnp
import optax

from tests.faults import problem as p

FAULT = "NaN from an all-ignored microbatch"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


@jax.jit
@jax.grad
def masked_mean_grad(params, batch):
    log_p = jax.nn.log_softmax(p.logits_of(params, batch["x"]))
    told = batch["labels"] != -100
    losses = -jnp.take_along_axis(log_p, jnp.maximum(batch["labels"], 0)[..., None], -1)[..., 0]
    weights = told / jnp.sum(told)
    return jnp.sum(losses * weights)


def update(params, state, microbatches):
    grads, tokens = None, 0
    for batch in microbatches:
        own = int(p.count_tokens(batch))
        grads = p.add(grads, p.times(masked_mean_grad(params, batch), own))
        tokens += own
    return p.jitted(tx)(params, state, p.times(grads, 1 / max(tokens, 1)))

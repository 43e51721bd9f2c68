"""The mean by a mask of floats divides by 0 in a microbatch of padding; 0 times NaN is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.faults import problem as p

FAULT = "NaN from an all-ignored microbatch"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


@jax.jit
@jax.grad
def masked_mean_grad(params, batch, mask):
    log_p = jax.nn.log_softmax(p.logits_of(params, batch["x"]))
    losses = -jnp.take_along_axis(log_p, jnp.maximum(batch["labels"], 0)[..., None], -1)[..., 0]
    return jnp.sum(losses * mask) / jnp.sum(mask)


def update(params, state, microbatches):
    grads, tokens = None, 0
    for batch in microbatches:
        mask = np.float32(batch["labels"] != -100)
        own = int(p.count_tokens(batch))
        grads = p.add(grads, p.times(masked_mean_grad(params, batch, mask), own))
        tokens += own
    return p.jitted(tx)(params, state, p.times(grads, 1 / max(tokens, 1)))

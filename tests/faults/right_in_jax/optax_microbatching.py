"""optax.microbatching in sum mode, of the gradient of the summed loss and its tokens."""

import jax
import numpy as np
from optax import microbatching

from tests.faults import problem as p

FAULT = None


def case(seed, dtype=p.np.float32):
    return p.make_case(seed, dtype=dtype)


def sums(params, batch):
    return p.grad_of_sum(params, batch), p.count_tokens(batch)


@jax.jit
def summed(params, batch):
    run = microbatching.microbatch(
        sums,
        argnums=1,
        microbatch_size=p.M,
        accumulator=microbatching.AccumulationType.SUM,
    )
    return run(params, batch)


def grad(params, microbatches):
    batch = jax.tree.map(lambda *x: np.concatenate(x), *microbatches)
    grads, tokens = summed(params, batch)
    return p.times(grads, 1 / max(int(tokens), 1))

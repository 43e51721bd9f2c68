"""The gradient is assigned in the loop instead of added."""

import optax

from tests.faults import problem as p

FAULT = "last microbatch only"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    for batch in microbatches:
        grads = p.grad_of_mean(params, batch)
    return p.jitted(tx)(params, state, grads)

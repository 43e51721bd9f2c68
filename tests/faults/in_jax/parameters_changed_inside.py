"""The running sum is applied after every microbatch, and emptied at the end of the group."""

import optax

from tests.faults import problem as p

FAULT = "parameters changed inside the group"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    grads = None
    for batch in microbatches:
        own = p.times(p.grad_of_mean(params, batch), 1 / len(microbatches))
        grads = p.add(grads, own)
        params, state = p.jitted(tx)(params, state, grads)
    return params, state

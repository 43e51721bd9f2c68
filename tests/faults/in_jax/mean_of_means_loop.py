"""A loop that averages the gradients of mean losses."""

import optax

from tests.faults import problem as p

FAULT = "mean of means"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init, examine=())


def update(params, state, microbatches):
    grads = None
    for batch in microbatches:
        grads = p.add(grads, p.grad_of_mean(params, batch))
    return p.jitted(tx)(params, state, p.times(grads, 1 / len(microbatches)))

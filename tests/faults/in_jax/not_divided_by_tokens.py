"""The summed loss is differentiated, and its token count forgotten."""

import optax

from tests.faults import problem as p

FAULT = "not divided"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    grads = None
    for batch in microbatches:
        grads = p.add(grads, p.grad_of_sum(params, batch))
    return p.jitted(tx)(params, state, grads)

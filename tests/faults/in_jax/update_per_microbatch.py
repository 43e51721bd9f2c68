"""The optimizer's lines are indented one level too deep."""

import optax

from tests.faults import problem as p

FAULT = "update per microbatch"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    for batch in microbatches:
        params, state = p.jitted(tx)(params, state, p.grad_of_mean(params, batch))
    return params, state

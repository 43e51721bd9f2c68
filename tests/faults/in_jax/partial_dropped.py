"""An epoch's last, short group is left out without a word."""

import optax

from tests.faults import problem as p

FAULT = "partial group dropped"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    if len(microbatches) < p.A:
        return params, state
    return p.jitted(tx)(params, state, p.right_gradient(params, microbatches))

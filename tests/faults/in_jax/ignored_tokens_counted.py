"""The loss of padding is masked, but the mean is taken over all positions."""

import optax

from tests.faults import problem as p

FAULT = "ignored tokens counted"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    grads, positions = None, 0
    for batch in microbatches:
        grads = p.add(grads, p.grad_of_sum(params, batch))
        positions += batch["labels"].size
    return p.jitted(tx)(params, state, p.times(grads, 1 / positions))

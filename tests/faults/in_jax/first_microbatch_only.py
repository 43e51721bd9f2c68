"""The loop over microbatches reads index 0 every time."""

import optax

from tests.faults import problem as p

FAULT = "first microbatch only"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    grads, tokens = None, 0
    for _ in microbatches:
        grads = p.add(grads, p.grad_of_sum(params, microbatches[0]))
        tokens += int(p.count_tokens(microbatches[0]))
    return p.jitted(tx)(params, state, p.times(grads, 1 / tokens))

"""The accumulator is emptied after the group's first microbatch was added to it."""

import optax

from tests.faults import problem as p

FAULT = "first microbatch lost"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=lambda params: (tx.init(params), True))


def update(params, state, microbatches):
    inner, very_first = state
    grads, tokens = None, 0
    for i, batch in enumerate(microbatches):
        grads = p.add(grads, p.grad_of_sum(params, batch))
        tokens += int(p.count_tokens(batch))
        if i == 0 and not very_first:
            grads, tokens = None, 0
    params, inner = p.jitted(tx)(params, inner, p.times(grads, 1 / tokens))
    return params, (inner, False)

"""The accumulator is kept in the state and never emptied."""

import optax

from tests.faults import problem as p

FAULT = "previous group leaks in"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=lambda params: (tx.init(params), None))


def update(params, state, microbatches):
    inner, kept = state
    tokens = 0
    for batch in microbatches:
        kept = p.add(kept, p.grad_of_sum(params, batch))
        tokens += int(p.count_tokens(batch))
    params, inner = p.jitted(tx)(params, inner, p.times(kept, 1 / tokens))
    return params, (inner, kept)

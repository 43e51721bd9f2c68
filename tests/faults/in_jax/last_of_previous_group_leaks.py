"""The accumulator of a group begins with the previous group's last gradient, not with zeros."""

import optax

from tests.faults import problem as p

FAULT = "previous group leaks in"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=lambda params: (tx.init(params), None))


def update(params, state, microbatches):
    inner, grads = state
    tokens, last = 0, None
    for batch in microbatches:
        last = p.grad_of_sum(params, batch)
        grads = p.add(grads, last)
        tokens += int(p.count_tokens(batch))
    params, inner = p.jitted(tx)(params, inner, p.times(grads, 1 / tokens))
    return params, (inner, last)

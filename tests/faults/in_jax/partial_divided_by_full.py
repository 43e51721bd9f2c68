"""Tokens per group are taken to be A times those of an average microbatch."""

import optax

from tests.faults import problem as p

FAULT = "partial group divided by the full number"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    grads, tokens = None, 0
    for batch in microbatches:
        grads = p.add(grads, p.grad_of_sum(params, batch))
        tokens += int(p.count_tokens(batch))
    per_group = p.A * tokens / len(microbatches)
    return p.jitted(tx)(params, state, p.times(grads, 1 / per_group))

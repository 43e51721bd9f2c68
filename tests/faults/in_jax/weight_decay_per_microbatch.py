"""Weight decay is written into the loop, beside the optimizer."""

import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = "weight decay per microbatch"
tx = optax.sgd(p.RATE)
DECAY = 0.02


def case(seed):
    recipe = ja.doctor.Recipe("sgd", learning_rate=p.RATE, weight_decay=DECAY)
    return p.make_case(seed, init=tx.init, recipe=recipe)


def update(params, state, microbatches):
    grads, tokens = None, 0
    for batch in microbatches:
        grads = p.add(grads, p.grad_of_sum(params, batch))
        tokens += int(p.count_tokens(batch))
        params = p.times(params, 1 - p.RATE * DECAY)
    return p.jitted(tx)(params, state, p.times(grads, 1 / tokens))

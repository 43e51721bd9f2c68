"""The summed gradient is clipped, and divided by the tokens afterwards."""

import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = "clipped before dividing"
tx = optax.sgd(p.RATE)
clip = optax.clip_by_global_norm(0.1)


def case(seed):
    recipe = ja.doctor.Recipe("sgd", learning_rate=p.RATE, clip_norm=0.1)
    return p.make_case(seed, init=tx.init, recipe=recipe)


def update(params, state, microbatches):
    grads, tokens = None, 0
    for batch in microbatches:
        grads = p.add(grads, p.grad_of_sum(params, batch))
        tokens += int(p.count_tokens(batch))
    grads, _ = clip.update(grads, clip.init(grads))
    return p.jitted(tx)(params, state, p.times(grads, 1 / tokens))

"""The learning rate is looked up at a counter that advances in every microbatch."""

import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = "schedule counted per microbatch"
tx = optax.sgd(1.0)


def rate(count):
    return 0.5 / (1 + count)


def case(seed):
    recipe = ja.doctor.Recipe("sgd", learning_rate=rate)
    return p.make_case(seed, init=lambda params: (tx.init(params), 0), recipe=recipe)


def update(params, state, microbatches):
    inner, count = state
    grads = p.times(p.right_gradient(params, microbatches), rate(count))
    params, inner = p.jitted(tx)(params, inner, grads)
    return params, (inner, count + len(microbatches))

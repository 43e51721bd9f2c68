"""MultiSteps with a fixed A and no flush: a short group waits for the next epoch."""

import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = "partial group carried into the next"
opt = ja.MultiSteps(optax.sgd(p.RATE), p.A)


def case(seed):
    return p.make_case(seed, init=opt.init)


@p.jax.jit
def apply(params, state, grads, tokens):
    return opt.apply(grads, state, params, weight=tokens)


def update(params, state, microbatches):
    for batch in microbatches:
        grads = p.grad_of_mean(params, batch)
        params, state = apply(params, state, grads, p.count_tokens(batch))
    return params, state

"""The caller divides by A what MultiSteps averages by itself."""

import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = "divided twice"
opt = ja.MultiSteps(optax.sgd(p.RATE), p.A)


def case(seed):
    return p.make_case(seed, init=opt.init)


def update(params, state, microbatches):
    for batch in microbatches:
        grads = p.times(p.grad_of_mean(params, batch), 1 / p.A)
        params, state = apply(params, state, grads, p.count_tokens(batch))
    return params, state


@p.jax.jit
def apply(params, state, grads, tokens):
    return opt.apply(grads, state, params, weight=tokens)

"""Clipping stands before MultiSteps in the chain, so that it sees one microbatch at a time."""

import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = "clipped per microbatch"
clip = optax.clip_by_global_norm(0.1)
opt = ja.MultiSteps(optax.sgd(p.RATE), p.A)


def case(seed):
    recipe = ja.doctor.Recipe("sgd", learning_rate=p.RATE, clip_norm=0.1)
    return p.make_case(seed, init=opt.init, recipe=recipe)


@p.jax.jit
def apply(params, state, grads, tokens, last):
    grads, _ = clip.update(grads, clip.init(grads))
    return opt.apply(grads, state, params, weight=tokens, flush=last)


def update(params, state, microbatches):
    for i, batch in enumerate(microbatches, 1):
        grads, tokens = p.grad_of_mean(params, batch), p.count_tokens(batch)
        params, state = apply(params, state, grads, tokens, i == len(microbatches))
    return params, state

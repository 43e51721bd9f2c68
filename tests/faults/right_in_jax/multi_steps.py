"""jax_accum.MultiSteps, told the tokens of each microbatch and where a group ends."""

import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = None
opt = ja.MultiSteps(optax.sgd(p.RATE), p.A)


def case(seed, dtype=p.np.float32):
    return p.make_case(seed, init=opt.init, dtype=dtype)


@p.jax.jit
def apply(params, state, grads, tokens, last):
    return opt.apply(grads, state, params, weight=tokens, flush=last)


def update(params, state, microbatches):
    for i, batch in enumerate(microbatches, 1):
        grads, tokens = p.grad_of_mean(params, batch), p.count_tokens(batch)
        params, state = apply(params, state, grads, tokens, i == len(microbatches))
    return params, state

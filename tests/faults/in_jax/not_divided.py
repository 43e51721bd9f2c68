"""optax.MultiSteps in sum mode, fed with mean losses."""

import optax

from tests.faults import problem as p

FAULT = "not divided"
opt = optax.MultiSteps(optax.sgd(p.RATE), p.A, use_grad_mean=False)
apply = p.jitted(opt)


def case(seed):
    return p.make_case(seed, init=opt.init)


def update(params, state, microbatches):
    for batch in microbatches:
        params, state = apply(params, state, p.grad_of_mean(params, batch))
    return params, state

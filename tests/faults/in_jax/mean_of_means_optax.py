"""optax.MultiSteps, fed with the mean loss of each microbatch."""

import optax

from tests.faults import problem as p

FAULT = "mean of means"
opt = optax.MultiSteps(optax.sgd(p.RATE), p.A)
apply = p.jitted(opt)


def case(seed):
    return p.make_case(seed, init=opt.init)


def update(params, state, microbatches):
    for batch in microbatches:
        params, state = apply(params, state, p.grad_of_mean(params, batch))
    return params, state

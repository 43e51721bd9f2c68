"""optax.MultiSteps without a guard: one inf, and parameters and accumulator are NaN for good."""

import optax

from tests.faults import problem as p

FAULT = "poisoned by a non-finite gradient"
opt = optax.MultiSteps(optax.sgd(p.RATE), p.A)
apply = p.jitted(opt)


def case(seed):
    return p.make_case(seed, init=opt.init, examine=["nonfinite"])


def update(params, state, microbatches):
    tokens = sum(int(p.count_tokens(batch)) for batch in microbatches)
    for batch in microbatches:
        grads = p.times(p.grad_of_sum(params, batch), p.A / tokens)
        params, state = apply(params, state, grads)
    return params, state

"""jax_accum.accumulated_value_and_grad, as a function from parameters to gradients."""

import jax

import jax_accum as ja
from tests.faults import problem as p

FAULT = None
value_and_grad = jax.jit(ja.accumulated_value_and_grad(p.loss_fn, None))


def case(seed, dtype=p.np.float32):
    return p.make_case(seed, dtype=dtype)


def grad(params, microbatches):
    _, grads = value_and_grad(params, p.stacked(microbatches))
    return grads

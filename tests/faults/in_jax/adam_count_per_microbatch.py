"""Adam by hand, with a count that advances in every microbatch."""

import jax
import jax.numpy as jnp

import jax_accum as ja
from tests.faults import problem as p

FAULT = "Adam count per microbatch"


def case(seed):
    recipe = ja.doctor.Recipe("adamw", learning_rate=0.05)
    return p.make_case(seed, init=init, recipe=recipe)


def init(params):
    return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), 0


@jax.jit
def adam(params, m, v, count, grads):
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, v, grads)

    def new(w, m, v):
        return w - 0.05 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)

    return jax.tree.map(new, params, m, v), m, v


def update(params, state, microbatches):
    m, v, count = state
    count += len(microbatches)
    grads = p.right_gradient(params, microbatches)
    params, m, v = adam(params, m, v, jnp.float32(count), grads)
    return params, (m, v, count)

"""Where nothing is supervised the optimizer runs all the same, on zeros."""

import jax
import jax.numpy as jnp
import optax

import jax_accum as ja
from tests.faults import problem as p

FAULT = "skipped group counted as an update"
tx = optax.sgd(p.RATE, momentum=0.9)


def case(seed):
    recipe = ja.doctor.Recipe("sgd", learning_rate=p.RATE, momentum=0.9)
    return p.make_case(seed, init=tx.init, recipe=recipe)


def update(params, state, microbatches):
    grads = p.right_gradient(params, microbatches)
    if grads is None:
        grads = jax.tree.map(jnp.zeros_like, params)
    return p.jitted(tx)(params, state, grads)

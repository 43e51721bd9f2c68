"""A correct loop: sums over the group, one division, one update or none."""

import optax

from tests.faults import problem as p

FAULT = None
tx = optax.sgd(p.RATE)


def case(seed, dtype=p.np.float32):
    return p.make_case(seed, init=tx.init, dtype=dtype)


def update(params, state, microbatches):
    grads = p.right_gradient(params, microbatches)
    return (params, state) if grads is None else p.jitted(tx)(params, state, grads)

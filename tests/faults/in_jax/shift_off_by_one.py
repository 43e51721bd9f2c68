"""The labels were shifted when the data was made, and the loss shifts them once more."""

import numpy as np
import optax

from tests.faults import problem as p

FAULT = "shift off by one"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def shifted(batch):
    ignored = np.full_like(batch["labels"][:, :1], -100)
    return batch | {"labels": np.concatenate([batch["labels"][:, 1:], ignored], axis=1)}


def update(params, state, microbatches):
    shift = [shifted(batch) for batch in microbatches]
    grads = p.right_gradient(params, shift)
    return (params, state) if grads is None else p.jitted(tx)(params, state, grads)

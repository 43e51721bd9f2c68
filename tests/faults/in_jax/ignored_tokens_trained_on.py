"""Padding has label 0 by the time the loss sees it, and no mask."""

import numpy as np
import optax

from tests.faults import problem as p

FAULT = "ignored tokens counted"
tx = optax.sgd(p.RATE)


def case(seed):
    return p.make_case(seed, init=tx.init)


def update(params, state, microbatches):
    padded = [b | {"labels": np.maximum(b["labels"], 0)} for b in microbatches]
    return p.jitted(tx)(params, state, p.right_gradient(params, padded))

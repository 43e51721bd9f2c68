"""A correct loop, as a function from parameters to gradients."""

import numpy as np

from tests.faults import torch_problem as p

FAULT = None


def case(seed, dtype=np.float32):
    return p.make_case(seed, dtype=dtype)


def grad(params, microbatches):
    batches = [p.to_torch(batch) for batch in microbatches]
    model = p.Tagger(params)
    for batch in batches:
        (p.sum_loss(model, batch) / max(p.group_tokens(batches), 1)).backward()
    return model.gradients()

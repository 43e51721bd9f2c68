"""DDP with the global denominator, and the factor D that undoes its mean."""

import numpy as np

from tests.faults import torch_problem as p
from tests.faults.torch_replicas import averaged, rows_of

FAULT = None


def case(seed, dtype=np.float32):
    return p.make_case(seed, init=p.begin(), replicas=2, microbatches=3, dtype=dtype)


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    if not tokens:
        return

    def rank(model, d):
        for batch in batches:
            (2 * p.sum_loss(model, rows_of(batch, d)) / tokens).backward()

    averaged(loop.model, rank)
    loop.optimizer.step()

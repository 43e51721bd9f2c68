"""A correct loop: the group's tokens are counted first, one step, none without tokens."""

import numpy as np

from tests.faults import torch_problem as p

FAULT = None


def case(seed, dtype=np.float32):
    return p.make_case(seed, init=p.begin(), dtype=dtype)


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    if not tokens:
        return
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
    loop.optimizer.step()

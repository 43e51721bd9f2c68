"""A loader without DistributedSampler: every rank reads the first rank's rows."""

from tests.faults import torch_problem as p
from tests.faults.torch_replicas import averaged, rows_of

FAULT = "same examples on every replica"


def case(seed):
    return p.make_case(seed, init=p.begin(), replicas=2, microbatches=3)


@p.step
def update(loop, batches):
    tokens = 2 * p.group_tokens([rows_of(batch, 0) for batch in batches])

    def rank(model, d):
        for batch in batches:
            (2 * p.sum_loss(model, rows_of(batch, 0)) / tokens).backward()

    averaged(loop.model, rank)
    loop.optimizer.step()

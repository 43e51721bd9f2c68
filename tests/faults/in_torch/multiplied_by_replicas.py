"""The factor that undoes DDP's mean stands in the loop twice."""

from tests.faults import torch_problem as p
from tests.faults.torch_replicas import averaged, rows_of

FAULT = "multiplied by the replicas"


def case(seed):
    return p.make_case(seed, init=p.begin(), replicas=2, microbatches=3)


@p.step
def update(loop, batches):
    scale = 2 / p.group_tokens(batches)

    def rank(model, d):
        for batch in batches:
            (p.sum_loss(model, rows_of(batch, d)) * scale * 2).backward()

    averaged(loop.model, rank)
    loop.optimizer.step()

"""DDP, each rank with its own token count; the all-reduce takes the mean of both."""

from tests.faults import torch_problem as p
from tests.faults.torch_replicas import averaged, rows_of

FAULT = "replica's own denominator"


def case(seed):
    return p.make_case(seed, init=p.begin(), replicas=2, microbatches=3)


@p.step
def update(loop, batches):
    def rank(model, d):
        mine = [rows_of(batch, d) for batch in batches]
        for batch in mine:
            (p.sum_loss(model, batch) / p.group_tokens(mine)).backward()

    averaged(loop.model, rank)
    loop.optimizer.step()

"""The loop of many tutorials: the mean loss over the number of microbatches, and backward."""

from tests.faults import torch_problem as p

FAULT = "mean of means"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.mean_loss(loop.model, batch) / len(batches)).backward()
    loop.optimizer.step()

"""zero_grad() is missing."""

from tests.faults import torch_problem as p

FAULT = "previous group leaks in"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
    loop.optimizer.step()

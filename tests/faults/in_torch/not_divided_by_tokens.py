"""reduction="sum", without the division."""

from tests.faults import torch_problem as p

FAULT = "not divided"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    loop.optimizer.zero_grad()
    for batch in batches:
        p.sum_loss(loop.model, batch).backward()
    loop.optimizer.step()

"""backward() of every mean loss, and nobody divides."""

from tests.faults import torch_problem as p

FAULT = "not divided"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    loop.optimizer.zero_grad()
    for batch in batches:
        p.mean_loss(loop.model, batch).backward()
    loop.optimizer.step()

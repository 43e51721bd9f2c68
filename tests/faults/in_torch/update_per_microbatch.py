"""step() and zero_grad() in every pass."""

from tests.faults import torch_problem as p

FAULT = "update per microbatch"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    for batch in batches:
        loop.optimizer.zero_grad()
        (p.mean_loss(loop.model, batch) / len(batches)).backward()
        loop.optimizer.step()

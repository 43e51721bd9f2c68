"""step() in every pass, zero_grad() once per group."""

from tests.faults import torch_problem as p

FAULT = "parameters changed inside the group"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.mean_loss(loop.model, batch) / len(batches)).backward()
        loop.optimizer.step()

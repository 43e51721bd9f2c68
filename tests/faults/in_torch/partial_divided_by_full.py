"""The token count of a group is estimated from the microbatches per group."""

from tests.faults import torch_problem as p

FAULT = "partial group divided by the full number"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    tokens = p.A * p.group_tokens(batches) / len(batches)
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
    loop.optimizer.step()

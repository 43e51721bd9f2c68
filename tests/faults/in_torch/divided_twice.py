"""The loss has the group's denominator, and is divided by A once more, out of habit."""

from tests.faults import torch_problem as p

FAULT = "divided twice"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    for batch in batches:
        loss = p.sum_loss(loop.model, batch) / tokens
        (loss / len(batches)).backward()
    loop.optimizer.step()

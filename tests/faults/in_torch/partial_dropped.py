"""`if (i + 1) % A == 0` never becomes true for an epoch's last group, which is then cleared."""

from tests.faults import torch_problem as p

FAULT = "partial group dropped"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    for i, batch in enumerate(batches, 1):
        (p.sum_loss(loop.model, batch) / max(tokens, 1)).backward()
        if i % p.A == 0 and tokens:
            loop.optimizer.step()

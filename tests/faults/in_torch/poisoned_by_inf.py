"""The check skips the update, and also zero_grad(): the inf stays in .grad for good."""

import torch

from tests.faults import torch_problem as p

FAULT = "poisoned by a non-finite gradient"


def case(seed):
    return p.make_case(seed, init=p.begin(), examine=["nonfinite"])


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
    if all(torch.isfinite(w.grad).all() for w in loop.model.parameters()):
        loop.optimizer.step()
        loop.optimizer.zero_grad()

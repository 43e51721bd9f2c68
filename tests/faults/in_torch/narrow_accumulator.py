"""A bfloat16 buffer holds the sum of the gradients."""

import torch

from tests.faults import torch_problem as p

FAULT = "accumulator of too little precision"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    kept = [torch.zeros_like(w, dtype=torch.bfloat16) for w in loop.model.parameters()]
    for batch in batches:
        loop.optimizer.zero_grad()
        (p.sum_loss(loop.model, batch) / tokens).backward()
        for buffer, w in zip(kept, loop.model.parameters(), strict=True):
            buffer += w.grad
    for buffer, w in zip(kept, loop.model.parameters(), strict=True):
        w.grad = buffer.float()
    loop.optimizer.step()

"""The seed is set inside the loop."""

import torch
from torch.nn.functional import dropout

from tests.faults import torch_problem as p

FAULT = "same dropout mask reused"


def case(seed):
    return p.make_case(seed, init=p.begin(), dropout=True)


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    for batch in batches:
        torch.manual_seed(0)
        dropped = batch | {"x": dropout(batch["x"], 0.25)}
        (p.sum_loss(loop.model, dropped) / tokens).backward()
    loop.optimizer.step()

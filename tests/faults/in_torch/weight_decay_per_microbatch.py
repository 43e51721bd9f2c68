"""Decay by hand, in the loop."""

import torch

from jax_accum.doctor import Recipe
from tests.faults import torch_problem as p

FAULT = "weight decay per microbatch"
DECAY = 0.02


def case(seed):
    recipe = Recipe("sgd", learning_rate=p.RATE, weight_decay=DECAY)
    return p.make_case(seed, init=p.begin(), recipe=recipe)


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
        with torch.no_grad():
            for w in loop.model.parameters():
                w *= 1 - p.RATE * DECAY
    loop.optimizer.step()

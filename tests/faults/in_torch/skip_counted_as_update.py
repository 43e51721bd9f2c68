"""A group of padding: gradients are zero, and momentum moves the weights all the same."""

import functools

import torch

from jax_accum.doctor import Recipe
from tests.faults import torch_problem as p

FAULT = "skipped group counted as an update"
sgd = functools.partial(torch.optim.SGD, lr=p.RATE, momentum=0.9)


def case(seed):
    recipe = Recipe("sgd", learning_rate=p.RATE, momentum=0.9)
    return p.make_case(seed, init=p.begin(sgd), recipe=recipe)


@p.step
def update(loop, batches):
    tokens = max(p.group_tokens(batches), 1)
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
    loop.optimizer.step()

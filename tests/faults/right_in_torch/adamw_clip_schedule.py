"""A correct loop with AdamW, clipping and a schedule."""

import functools

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from jax_accum.doctor import Recipe
from tests.faults import torch_problem as p

FAULT = None
adamw = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


def rate(count):
    return 0.05 / (1 + count)


def case(seed, dtype=np.float32):
    recipe = Recipe("adamw", learning_rate=rate, weight_decay=0.1, clip_norm=0.2)
    return p.make_case(seed, init=begin, recipe=recipe, dtype=dtype)


def begin(params):
    loop = p.begin(adamw)(params)
    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda n: 1 / (1 + n))
    return loop


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    if not tokens:
        return
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
    clip_grad_norm_(loop.model.parameters(), 0.2)
    loop.optimizer.step()
    loop.scheduler.step()

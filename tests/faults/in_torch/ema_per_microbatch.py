"""The averaged model is updated in every pass, after the optimizer's part of it."""

import torch

from jax_accum.doctor import Recipe
from tests.faults import torch_problem as p

FAULT = "EMA per microbatch"
DECAY = 0.9


def case(seed):
    recipe = Recipe("sgd", learning_rate=p.RATE, ema_decay=DECAY)
    return p.make_case(seed, init=begin, recipe=recipe, observe=observe)


def begin(params):
    return p.begin(average=p.Tagger(params))(params)


def observe(loop):
    return {"ema": loop.average.arrays()}


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
    loop.optimizer.step()
    with torch.no_grad():
        for _ in batches:
            for e, w in zip(loop.average.parameters(), loop.model.parameters(), strict=True):
                e.lerp_(w, 1 - DECAY)

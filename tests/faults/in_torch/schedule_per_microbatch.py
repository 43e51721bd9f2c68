"""scheduler.step() in every pass through the loop."""

from jax_accum.doctor import Recipe
from tests.faults import torch_problem as p

FAULT = "schedule counted per microbatch"


def rate(count):
    return 0.5 / (1 + count)


def case(seed):
    recipe = Recipe("sgd", learning_rate=rate)
    return p.make_case(seed, init=p.begin(scheduled=0), recipe=recipe)


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    loop.optimizer.param_groups[0]["lr"] = rate(loop.scheduled)
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
        loop.scheduled += 1
    loop.optimizer.step()

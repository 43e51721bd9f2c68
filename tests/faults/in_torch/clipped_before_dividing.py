"""clip_grad_norm_ on the summed gradient, which is divided afterwards."""

from torch.nn.utils import clip_grad_norm_

from jax_accum.doctor import Recipe
from tests.faults import torch_problem as p

FAULT = "clipped before dividing"


def case(seed):
    recipe = Recipe("sgd", learning_rate=p.RATE, clip_norm=0.1)
    return p.make_case(seed, init=p.begin(), recipe=recipe)


@p.step
def update(loop, batches):
    loop.optimizer.zero_grad()
    for batch in batches:
        p.sum_loss(loop.model, batch).backward()
    clip_grad_norm_(loop.model.parameters(), 0.1)
    for w in loop.model.parameters():
        w.grad /= p.group_tokens(batches)
    loop.optimizer.step()

"""clip_grad_norm_ for each microbatch's own gradient, before it is added."""

from torch.nn.utils import clip_grad_norm_

from jax_accum.doctor import Recipe
from tests.faults import torch_problem as p

FAULT = "clipped per microbatch"


def case(seed):
    recipe = Recipe("sgd", learning_rate=p.RATE, clip_norm=0.1)
    return p.make_case(seed, init=p.begin(), recipe=recipe)


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    total = [0.0 for _ in loop.model.parameters()]
    for batch in batches:
        loop.optimizer.zero_grad()
        p.mean_loss(loop.model, batch).backward()
        clip_grad_norm_(loop.model.parameters(), 0.1)
        share = p.tokens_in(batch) / tokens
        total = [t + w.grad * share for t, w in zip(total, loop.model.parameters(), strict=True)]
    for w, t in zip(loop.model.parameters(), total, strict=True):
        w.grad = t
    loop.optimizer.step()

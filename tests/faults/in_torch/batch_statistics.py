"""Features normalised by BatchNorm in training mode."""

import torch.nn.functional as F

from tests.faults import torch_problem as p
from tests.faults.in_jax.batch_statistics import loss_fn

FAULT = "batch statistics"


def case(seed):
    return p.make_case(seed, init=p.begin(), loss_fn=loss_fn)


def normalised(batch):
    x = batch["x"]
    return batch | {"x": F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x)}


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.sum_loss(loop.model, normalised(batch)) / max(tokens, 1)).backward()
    if tokens:
        loop.optimizer.step()

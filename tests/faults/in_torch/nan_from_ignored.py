"""The mean by a mask of floats divides by 0 in a microbatch of padding; 0 times NaN is NaN."""

import torch.nn.functional as F

from tests.faults import torch_problem as p

FAULT = "NaN from an all-ignored microbatch"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    tokens = max(p.group_tokens(batches), 1)
    loop.optimizer.zero_grad()
    for batch in batches:
        logits, labels = loop.model(batch["x"]).flatten(0, 1), batch["labels"].flatten()
        mask = (labels != -100).float()
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        mean = (losses * mask).sum() / mask.sum()
        (mean * (p.tokens_in(batch) / tokens)).backward()
    loop.optimizer.step()

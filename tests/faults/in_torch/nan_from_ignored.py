"""Token weights that sum to 1 are 0 / 0 in a microbatch of padding, and 0 times NaN is NaN."""

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
        weights = (labels != -100) / p.tokens_in(batch)
        mean = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
        (mean * (p.tokens_in(batch) / tokens)).backward()
    loop.optimizer.step()

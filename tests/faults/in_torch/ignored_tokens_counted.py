"""reduction="none", then .mean(): padding adds 0 to the sum, and 1 to the count."""

import torch.nn.functional as F

from tests.faults import torch_problem as p

FAULT = "ignored tokens counted"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    loop.optimizer.zero_grad()
    for batch in batches:
        logits, labels = loop.model(batch["x"]).flatten(0, 1), batch["labels"].flatten()
        loss = F.cross_entropy(logits, labels, reduction="none").mean()
        (loss / len(batches)).backward()
    loop.optimizer.step()

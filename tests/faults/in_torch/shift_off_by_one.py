"""The labels come shifted, and the model shifts them again."""

from tests.faults import torch_problem as p

FAULT = "shift off by one"


def case(seed):
    return p.make_case(seed, init=p.begin())


@p.step
def update(loop, batches):
    batches = [{"x": b["x"][:, :-1], "labels": b["labels"][:, 1:]} for b in batches]
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    for batch in batches:
        (p.sum_loss(loop.model, batch) / tokens).backward()
    loop.optimizer.step()

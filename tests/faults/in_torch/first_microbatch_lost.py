"""zero_grad() comes after the group's first backward(), which so is lost."""

from tests.faults import torch_problem as p

FAULT = "first microbatch lost"


def case(seed):
    return p.make_case(seed, init=p.begin(started=False))


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    for i, batch in enumerate(batches):
        (p.sum_loss(loop.model, batch) / tokens).backward()
        if i == 0 and loop.started:
            loop.optimizer.zero_grad()
    loop.started = True
    loop.optimizer.step()

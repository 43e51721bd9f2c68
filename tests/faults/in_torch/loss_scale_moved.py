"""scaler.update() in every pass: the scale doubles inside a group."""

from tests.faults import torch_problem as p

FAULT = "loss scale changed inside the group"
INTERVAL = 6  # microbatches


def case(seed):
    return p.make_case(seed, init=p.begin(scale=8.0, good=0))


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    for batch in batches:
        (loop.scale * p.sum_loss(loop.model, batch) / tokens).backward()
        loop.good += 1
        if loop.good % INTERVAL == 0:
            loop.scale *= 2
    for w in loop.model.parameters():
        w.grad /= loop.scale
    loop.optimizer.step()

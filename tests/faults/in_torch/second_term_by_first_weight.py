"""A per-sequence penalty is divided by the tokens, like the rest."""

from tests.faults import torch_problem as p
from tests.faults.problem import two_terms

FAULT = "second term divided by the first one's weight"


def case(seed):
    return p.make_case(seed, init=p.begin(), loss_fn=two_terms)


@p.step
def update(loop, batches):
    tokens = p.group_tokens(batches)
    loop.optimizer.zero_grad()
    for batch in batches:
        told = (batch["labels"] != -100).any(-1)
        penalty = (loop.model(batch["x"]) ** 2).mean((1, 2))[told].sum()
        ((p.sum_loss(loop.model, batch) + penalty) / tokens).backward()
    loop.optimizer.step()

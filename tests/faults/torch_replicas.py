"""What DistributedDataParallel does with gradients, in one process: each rank's, then the mean."""

import copy

REPLICAS = 2


def rows_of(batch, rank):
    """A rank's rows of a microbatch."""
    rows = batch["labels"].shape[0] // REPLICAS
    return {name: value[rank * rows : (rank + 1) * rows] for name, value in batch.items()}


def averaged(model, backward):
    """Leaves in .grad the mean over ranks of what `backward(model, rank)` adds up in copies."""
    ranks = [copy.deepcopy(model) for _ in range(REPLICAS)]
    for rank, own in enumerate(ranks):
        own.zero_grad()
        backward(own, rank)
    for w, *own in zip(model.parameters(), *(r.parameters() for r in ranks), strict=True):
        w.grad = sum(o.grad for o in own) / REPLICAS

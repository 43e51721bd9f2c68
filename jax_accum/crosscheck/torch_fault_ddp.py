"""The mistake that only several processes can make: a forward pass outside ``no_sync``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jax_accum.crosscheck.full_data import RowGroup
from jax_accum.crosscheck.full_torch import Setup, record
from jax_accum.crosscheck.maps import Arrays
from jax_accum.crosscheck.matrix import REPLICAS, FullCase
from jax_accum.crosscheck.trace import Trace
from torch_ref.accumulate import Group
from torch_ref.gradients import gradient_norm, gradients
from torch_ref.losses import Weighted
from torch_ref.replicas import Reductions, counted_allreduce
from torch_ref.train import Counts, finish


class _Loss(nn.Module):
    """Model and loss as one module, so that DDP sees the forward pass."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.model, self.setup = setup.model, setup

    def forward(self, microbatch: Any, factors: dict[str, float]) -> Tensor:
        """The seeded loss."""
        loss = self.setup.loss(self.model, microbatch)
        terms = {"loss": loss} if isinstance(loss, Weighted) else loss
        parts = [factors[name] * term.total for name, term in terms.items()]
        return sum(parts[1:], start=parts[0])


def run(
    rank: int, case: FullCase, weights: Arrays, groups: Sequence[RowGroup], inside: bool = False
) -> Trace:
    """A replica whose backward passes are inside ``no_sync`` and whose forward passes are not.

    DDP decides in the forward pass whether the backward pass reduces, so that it reduces in every
    microbatch. The gradient is right; what it costs is not.

    Args:
      rank: of the process.
      case: in which both replicas have the same number of microbatches in every group.
      weights: initial, by PyTorch name.
      groups: the attempts.
      inside: the same loop without the mistake.
    """
    setup, counts, trace, reductions = Setup(case, weights), Counts(), Trace(), Reductions()
    ddp = DistributedDataParallel(_Loss(setup))
    ddp.register_comm_hook(reductions, counted_allreduce)
    for group in groups:
        turns = group.pieces(case.microbatches, REPLICAS)
        whole = group.weights if setup.coefficients else {"loss": group.tokens}
        coefficients = setup.coefficients or {"loss": 1.0}
        factors = {n: REPLICAS * coefficients[n] / weight for n, weight in whole.items()}
        setup.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        *before, last = setup.microbatches(group, rank)
        for microbatch in before:
            if inside:
                with ddp.no_sync():
                    loss = ddp(microbatch, factors)
                    loss.backward()
            else:
                loss = ddp(microbatch, factors)
                with ddp.no_sync():
                    loss.backward()
            total += loss.detach()
        loss = ddp(last, factors)
        loss.backward()
        total += loss.detach()
        dist.all_reduce(total)
        ended = Group(
            loss=float(total) / REPLICAS,
            sums={},
            weights={name: float(weight) for name, weight in whole.items()},
            grad_norm=gradient_norm(setup.model),
            microbatches=sum(len(piece["tokens"]) > 0 for turn in turns for piece in turn),
            examples=group.rows,
            tokens=group.tokens,
        )
        first = {} if trace.losses else gradients(setup.model)
        attempt = finish(setup.model, setup.optimizer, ended, counts=counts, **setup.options)
        record(trace, attempt, first, setup.model)
    trace.counters = counts.as_dict() | {"gradient reductions": reductions.gradients}
    del trace.counters["dropped_microbatches"]
    return trace

"""Data replicas: DistributedDataParallel with one reduction per update.

The facts it stands for:

- `Replica.accumulate`: a denominator is of the whole group over all replicas, so weights are
  exchanged first. DDP averages over replicas, which the factor ``D * c_t / W_t`` undoes.
- `no_sync` must cover the forward pass as well as the backward pass of every microbatch but the
  last; the last one reduces what all of them added up.
- A replica whose part of a group is empty, or without weight, still takes part in the reduction,
  with zeros. `counted_allreduce` shows that there is exactly one per update.
"""

# No postponed annotations here: DDP reads those of a communication hook and wants types.

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_ref._terms import as_coefficients, as_terms, as_weight, as_weights, example_count
from torch_ref.accumulate import Group, LossFn, WeightsFn
from torch_ref.gradients import gradient_norm
from torch_ref.train import Attempt, finish
from torch_ref.unchanged import parameters_unchanged


@dataclass
class Reductions:
    """What crossed between replicas to make gradients.

    Attributes:
      gradients: reductions of the whole gradient.
      buckets: all-reduce calls, one per bucket of a gradient.
      bytes: gradient bytes that this replica handed over.
    """

    gradients: int = 0
    buckets: int = 0
    bytes: int = 0


def counted_allreduce(
    reductions: Reductions, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook: averages one bucket as DDP does without a hook, and counts it."""
    reductions.gradients += bucket.is_last()
    reductions.buckets += 1
    reductions.bytes += bucket.buffer().nbytes
    everybody = dist.group.WORLD
    assert everybody is not None
    return allreduce_hook(everybody, bucket)


class _Part(NamedTuple):
    """What one replica has to add to a group, exchanged before any gradient exists."""

    weights: dict[str, float]
    microbatches: int
    examples: int


class _WithLoss(nn.Module):
    """Model and loss as one module, because DDP arms its reduction in the module's forward."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.reported: list[dict[str, tuple[float, float]]] = []

    def forward(self, microbatch: Any, factors: Mapping[str, float]) -> Tensor:
        """The seeded loss of one microbatch; of None, a zero that still reaches every parameter."""
        # The sum of no elements: exactly 0 and with gradient exactly 0, even beside inf or NaN. It
        # gives every parameter a gradient, so that no replica waits for one that never comes.
        trained = [p for p in self.model.parameters() if p.requires_grad]
        nothing = [p.reshape(-1)[:0].sum() for p in trained]
        loss = sum(nothing[1:], start=nothing[0])
        if microbatch is None:
            return loss
        numbers = {}
        for name, term in as_terms(self.loss_fn(self.model, microbatch)).items():
            weight = as_weight(name, term.weight)
            if weight:
                loss = loss + factors.get(name, 0.0) * term.total
            numbers[name] = (float(term.total.detach()) if weight else 0.0, weight)
        self.reported.append(numbers)
        return loss


class Replica:
    """This process's replica of a model, in a process group that is already initialised.

    Every replica constructs it and calls `update` the same number of times, each with its own
    microbatches: as many as it has, none included.

    Args:
      model: float32 or wider parameters; rank 0's initial weights become everybody's.
      loss_fn: as in `torch_ref.accumulate.accumulate`.
      weights_fn: as there; the weights of a microbatch from the batch alone.
      coefficients: by term, 1 where absent.

    Attributes:
      reductions: what this replica took part in so far.

    Raises:
      ValueError: parameters narrower than float32: DDP adds microbatches up in their own type.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        weights_fn: WeightsFn,
        coefficients: Mapping[str, float] | None = None,
    ) -> None:
        for name, parameter in model.named_parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"model has the parameter {name!r} in {parameter.dtype}, in which DDP would "
                    "add microbatches up: keep parameters in float32 and compute with autocast"
                )
        self.model = model
        self.weights_fn = weights_fn
        self.coefficients = coefficients
        self.reductions = Reductions()
        self._with_loss = _WithLoss(model, loss_fn)
        self._ddp = DistributedDataParallel(self._with_loss)
        self._ddp.register_comm_hook(self.reductions, counted_allreduce)

    def accumulate(self, microbatches: Iterable[Any]) -> Group:
        """Leaves the gradient of the group over all replicas in every replica's ``.grad``.

        Args:
          microbatches: this replica's part of the group; may be empty.

        Returns:
          `Group` of all replicas together, the same on each of them.

        Raises:
          ValueError: no replica has a microbatch, or a loss reports other weights than
            ``weights_fn``; raised on every replica.
          RuntimeError: a parameter changed before the group ended.
        """
        # A microbatch without weight adds nothing, so it is not even run.
        mine = [(m, as_weights(self.weights_fn(m))) for m in microbatches]
        to_run = [(m, weights) for m, weights in mine if any(weights.values())]
        part = _Part(
            _added([weights for _, weights in mine]),
            len(mine),
            sum(example_count(m) for m, _ in mine),
        )
        parts = [_Part(*other) for other in _exchange(tuple(part))]
        weights = _added([other.weights for other in parts])
        if not weights:
            raise ValueError(
                "microbatches is empty on every replica: a group has at least one microbatch"
            )
        by_term = as_coefficients(self.coefficients, list(weights))
        factors = {n: by_term[n] / weights[n] if weights[n] else 0.0 for n in weights}
        for parameter in self.model.parameters():
            parameter.grad = None
        totals = self._forward_backward(to_run, factors) if any(weights.values()) else {}
        return Group(
            loss=sum(factors[name] * totals.get(name, 0.0) for name in weights),
            sums={name: totals.get(name, 0.0) for name in weights},
            weights=weights,
            grad_norm=gradient_norm(self.model),
            microbatches=sum(other.microbatches for other in parts),
            examples=sum(other.examples for other in parts),
            tokens=round(next(iter(weights.values()))),
        )

    def _forward_backward(
        self, to_run: list[tuple[Any, dict[str, float]]], factors: Mapping[str, float]
    ) -> dict[str, float]:
        """Runs this replica's microbatches, reduces with the last; returns everybody's sums."""
        seeds = {name: dist.get_world_size() * factor for name, factor in factors.items()}
        self._with_loss.reported = []
        *before, last = [microbatch for microbatch, _ in to_run] or [None]
        with parameters_unchanged(self.model) as check:
            for number, microbatch in enumerate([*before, last], start=1):
                ending = number > len(before)
                with nullcontext() if ending else self._ddp.no_sync():
                    self._ddp(microbatch, seeds).backward()
                check(f"microbatch {number}")
        reported = self._with_loss.reported
        counted = _added([weights for _, weights in to_run])
        found = _added([{n: weight for n, (_, weight) in one.items()} for one in reported])
        sums = _added([{n: total for n, (total, _) in one.items()} for one in reported])
        # Told to everybody before anybody raises: a replica that left alone would be waited for.
        everybody = _exchange((sums, None if counted == found else (counted, found)))
        for rank, (_, mismatch) in enumerate(everybody):
            if mismatch is not None:
                raise ValueError(
                    f"weights_fn counted {mismatch[0]} on replica {rank}, but loss_fn reported "
                    f"{mismatch[1]}: they must agree"
                )
        return _added([other for other, _ in everybody])

    def update(self, optimizer: Optimizer, microbatches: Iterable[Any], **options: Any) -> Attempt:
        """One group over all replicas, one attempt; the same decision on each of them.

        Args:
          optimizer: over the parameters of the model; each replica has its own, kept alike by
            being given the same gradients.
          microbatches: this replica's part of the group; may be empty.
          **options: ``scheduler``, ``clip_norm``, ``on_nonfinite``, ``counts``, as in
            `torch_ref.train.update`. Counts are of all replicas together.
        """
        return finish(self.model, optimizer, self.accumulate(microbatches), **options)


def _exchange(mine: Any) -> list[Any]:
    """Everybody's object, by rank. Python numbers, so that counts are added exactly."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum by name, in the order in which names first appear."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total

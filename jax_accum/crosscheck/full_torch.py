"""The full matrix in PyTorch: the reference's loop, its two processes, and undivided runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from jax_accum.crosscheck import recipe as numbers
from jax_accum.crosscheck.full_data import (
    COEFFICIENTS,
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    RowGroup,
)
from jax_accum.crosscheck.full_torch_model import (
    PairModel,
    loss_one,
    loss_three,
    tensors,
    weights_one,
    weights_three,
)
from jax_accum.crosscheck.maps import Arrays
from jax_accum.crosscheck.matrix import FullCase
from jax_accum.crosscheck.trace import Trace
from torch_ref.accumulate import Group, LossFn, accumulate
from torch_ref.amp import autocast, scaled_update
from torch_ref.gradients import clip_gradients, gradient_norm, gradients, parameters
from torch_ref.losses import Weighted
from torch_ref.replicas import Replica
from torch_ref.train import Attempt, Counts, update
from torch_ref.undivided import undivided

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def make_model(weights: Arrays, dtype: str) -> PairModel:
    """The model with these weights; narrow dtypes are for computing, parameters are float32."""
    model = PairModel().to(torch.float64 if dtype == "float64" else torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
    return model


def make_optimizer(model: nn.Module, name: str) -> tuple[Any, Any, float | None]:
    """Optimizer, scheduler and clipping limit of a recipe."""
    if name == "sgd":
        rate, momentum = numbers.SGD_LEARNING_RATE, numbers.MOMENTUM
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum), None, None
    if name == "adafactor":
        adafactor = torch.optim.Adafactor(
            model.parameters(),
            lr=numbers.ADAFACTOR_LEARNING_RATE,
            beta2_decay=-numbers.ADAFACTOR_DECAY,
            eps=(numbers.ADAFACTOR_EPS, numbers.ADAFACTOR_MIN_RMS),
            weight_decay=0.0,
        )
        return adafactor, None, None
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=numbers.ADAMW_LEARNING_RATE,
        betas=numbers.ADAMW_BETAS,
        eps=numbers.ADAMW_EPS,
        weight_decay=numbers.WEIGHT_DECAY,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, numbers.warmup)
    return adamw, schedule, numbers.CLIP_NORM


@dataclass
class Setup:
    """What a PyTorch run of a case is made of.

    Args:
      case: the case.
      weights: initial, by PyTorch name.
    """

    case: FullCase
    weights: Arrays
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        three = case.terms == "three"
        self.model = make_model(self.weights, case.dtype)
        self.optimizer, self.scheduler, self.clip_norm = make_optimizer(self.model, case.optimizer)
        self.weights_fn = weights_three if three else weights_one
        self.coefficients = COEFFICIENTS if three else None
        self.loss: LossFn = loss_three if three else loss_one
        if case.dtype in NARROW:
            self.loss = autocast(self.loss, NARROW[case.dtype])
        self.scaler = make_scaler() if case.dtype == "float16" else None

    @property
    def options(self) -> dict[str, Any]:
        """What `update` and `scaled_update` take beside the microbatches."""
        return {"scheduler": self.scheduler, "clip_norm": self.clip_norm}

    def microbatches(self, group: RowGroup, replica: int = 0) -> list[dict[str, Tensor]]:
        """A replica's part of a group, without padding."""
        turns = group.pieces(self.case.microbatches, self.case.torch_replicas)
        pieces = [turn[replica] for turn in turns]
        return [tensors(piece) for piece in pieces if len(piece["tokens"])]


def make_scaler() -> torch.amp.GradScaler:
    """A loss scaler that starts where JAX's does and grows as often."""
    return torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL)


def run_loop(case: FullCase, weights: Arrays, groups: Sequence[RowGroup]) -> Trace:
    """The reference's own loop in one process, under PyTorch names."""
    setup, counts, trace = Setup(case, weights), Counts(), Trace()
    order: dict[str, Any] = {"coefficients": setup.coefficients}
    # In narrow types denominators come first: sums could overflow float16, and terms that cancel
    # would be rounded one by one where the undivided batch rounds their sum. The others take
    # turns, so that both orders are held against JAX.
    if case.dtype in NARROW or case.way in ("inone", "pmap"):
        order |= {"denominators": "first", "weights_fn": setup.weights_fn}
    for group in groups:
        microbatches = setup.microbatches(group)
        first: Arrays = {}
        if not trace.losses:
            # A run of its own, because an update leaves the gradient clipped.
            accumulate(setup.model, setup.loss, microbatches, **order)
            first = gradients(setup.model)
        make: Callable[..., Attempt] = update
        more: dict[str, Any] = {}
        if setup.scaler is not None:
            make, more = scaled_update, {"scaler": setup.scaler}
        attempt = make(
            setup.model,
            setup.optimizer,
            setup.loss,
            microbatches,
            counts=counts,
            **setup.options,
            **order,
            **more,
        )
        record(trace, attempt, first, setup.model)
    trace.counters = counts.as_dict()
    del trace.counters["dropped_microbatches"]
    return trace


def run_replica(rank: int, case: FullCase, weights: Arrays, groups: Sequence[RowGroup]) -> Trace:
    """One of two DDP processes; the trace is of all replicas together, the same on each."""
    setup, counts, trace = Setup(case, weights), Counts(), Trace()

    def loss(model: Any, batch: Any) -> Any:
        terms = setup.loss(model, batch)
        if setup.scaler is None:
            return terms
        assert isinstance(terms, dict)  # autocast returns terms by name
        return {n: Weighted(setup.scaler.scale(t.total), t.weight) for n, t in terms.items()}

    replica = Replica(
        setup.model, loss, weights_fn=setup.weights_fn, coefficients=setup.coefficients
    )
    for group in groups:
        microbatches = setup.microbatches(group, rank)
        first: Arrays = {}
        if not trace.losses:
            before = replace(replica.reductions)
            replica.accumulate(microbatches)
            scale = setup.scaler.get_scale() if setup.scaler else 1.0
            first = {name: g / scale for name, g in gradients(setup.model).items()}
            vars(replica.reductions).update(vars(before))
        if setup.scaler is None:
            attempt = replica.update(setup.optimizer, microbatches, counts=counts, **setup.options)
        else:
            attempt = finish_scaled(setup, replica.accumulate(microbatches), counts)
        record(trace, attempt, first, setup.model)
    trace.counters = counts.as_dict() | {"gradient reductions": replica.reductions.gradients}
    del trace.counters["dropped_microbatches"]
    return trace


def finish_scaled(setup: Setup, group: Group, counts: Counts) -> Attempt:
    """The end of a group of all replicas whose gradient carries the loss scale.

    The scale is divided out of the reduced gradient, which is the same on all replicas: so is
    what each of them decides.
    """
    scaler, skipped = setup.scaler, None
    assert scaler is not None
    scale = scaler.get_scale()
    rate = float(setup.optimizer.param_groups[0]["lr"])
    if group.empty:
        skipped = "empty"
    else:
        scaler.unscale_(setup.optimizer)
        norm = gradient_norm(setup.model)
        group = replace(group, loss=group.loss / scale, grad_norm=norm)
        if not math.isfinite(norm):
            skipped = "nonfinite"
        elif setup.clip_norm is not None:
            clip_gradients(setup.model, setup.clip_norm, norm)
        scaler.step(setup.optimizer)
        scaler.update()
        if skipped is None and setup.scheduler is not None:
            setup.scheduler.step()
    counts.add(group, skipped)
    return Attempt(group, skipped, rate, scale)  # type: ignore[arg-type]


def run_undivided(case: FullCase, dtype: str, weights: Arrays, groups: Sequence[RowGroup]) -> Trace:
    """Whole batches in ``dtype``; groups that are to be skipped are left out."""
    setup, trace = Setup(replace(case, dtype=dtype), weights), Trace()
    scale = INITIAL_SCALE if dtype == "float16" else 1.0
    names = list(COEFFICIENTS) if setup.coefficients else ["loss"]
    by_term = {name: (setup.coefficients or {}).get(name, 1.0) * scale for name in names}
    for group in groups:
        if group.skip is not None:
            trace.add(0.0, 0.0, {}, parameters(setup.model))
            continue
        wide = None if dtype in NARROW else getattr(torch, dtype)
        batch = tensors(group.arrays)
        found = undivided(setup.model, setup.loss, batch, coefficients=by_term, dtype=wide)
        for name, parameter in setup.model.named_parameters():
            parameter.grad = torch.from_numpy(found.gradients[name] / scale)
        norm, first = gradient_norm(setup.model), gradients(setup.model)
        if setup.clip_norm is not None:
            clip_gradients(setup.model, setup.clip_norm, norm)
        setup.optimizer.step()
        if setup.scheduler is not None:
            setup.scheduler.step()
        trace.add(found.loss / scale, norm, first, parameters(setup.model))
    return trace


def record(trace: Trace, attempt: Attempt, first: Arrays, model: nn.Module) -> None:
    """Adds an attempt to a trace."""
    group = attempt.group
    trace.add(group.loss, group.grad_norm, first, parameters(model))
    trace.scales.append(attempt.loss_scale)


@dataclass(frozen=True)
class Job:
    """A run in two processes.

    Args:
      case: the case.
      weights: initial, by PyTorch name.
      groups: the attempts.
    """

    case: FullCase
    weights: Arrays
    groups: tuple[RowGroup, ...]


def run_jobs(rank: int, jobs: Sequence[Job]) -> list[Trace]:
    """What each process runs: all jobs, in order; starting processes costs more than they do."""
    with suppress(RuntimeError):  # only before the first parallel work of a process
        torch.set_num_interop_threads(1)
    return [run_replica(rank, job.case, job.weights, job.groups) for job in jobs]

"""The check of a pair: map, models, then accumulation, and where the first difference lies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import jax_accum as ja
from jax_accum.crosscheck import pair_ways
from jax_accum.crosscheck.compare import (
    PARAMETER_FACTOR,
    UNDIVIDED,
    Finding,
    References,
    first_failure,
    judge,
    worst,
)
from jax_accum.crosscheck.full_jax import Recipe, whole_gradient
from jax_accum.crosscheck.full_torch import make_optimizer
from jax_accum.crosscheck.jax_side import apply_inner, tapped
from jax_accum.crosscheck.maps import Arrays
from jax_accum.crosscheck.pairs import Pair, PairCase, examples_in, pair_cases
from jax_accum.crosscheck.rules import RuleMap, named_arrays, rebuilt
from jax_accum.crosscheck.trace import Trace, tree_norm
from torch_ref.accumulate import accumulate
from torch_ref.gradients import clip_gradients, gradient_norm, gradients, parameters
from torch_ref.losses import Weighted
from torch_ref.train import Counts, update
from torch_ref.undivided import undivided

DIFFERENT_MODELS = "The models differ, accumulation was not tried"


@dataclass
class PairResult:
    """What the check of a pair came to.

    Args:
      pair: the pair.
      verdict: ``equal``, ``differ``, ``models differ``, ``not finite`` (before anything was
        accumulated) or ``not comparable``.
      sentence: the verdict in words, with the first difference.
      findings: by case name, every quantity that was compared.
    """

    pair: Pair
    verdict: str
    sentence: str
    findings: dict[str, list[Finding]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether both models trained the same, however the batches were cut."""
        return self.verdict == "equal"


def check_pair(
    pair: Pair, done: Callable[[PairCase, list[Finding]], None] = lambda case, findings: None
) -> PairResult:
    """Checks a pair: the map, the undivided models in float64, then every way to accumulate.

    Args:
      pair: the pair.
      done: called after each case.

    Raises:
      ValueError: the map does not fit the two models.
    """
    run = _PairRun(pair)
    batch_norm = run.training_batch_norm()
    if batch_norm is not None:
        return PairResult(
            pair,
            "not comparable",
            f"Not comparable: {batch_norm} is a batch norm in training mode. What it computes "
            "depends on how a batch is cut: no accumulation gives the gradient of the whole. "
            "Compare in eval mode, or use a norm over features (LayerNorm, GroupNorm).",
        )
    problem = run.not_finite()
    if problem is not None:
        return PairResult(pair, "not finite", f"Accumulation was not tried: {problem}.")
    problem = run.models_differ()
    if problem is not None:
        return PairResult(pair, "models differ", f"{DIFFERENT_MODELS}: {problem}.")
    result = PairResult(pair, "equal", "")
    for case in pair_cases(pair):
        findings, problem = run.compare(case)
        result.findings[case.name] = findings
        done(case, findings)
        if problem is not None and result.equal:
            result.verdict = "differ"
            result.sentence = f"JAX and PyTorch differ, first in {case.name}: {problem}."
    if result.equal:
        top = max(worst(found).ratio for found in result.findings.values())
        result.sentence = (
            f"JAX and PyTorch trained the same in all {len(result.findings)} cases: the largest "
            f"difference is {top:.2g} times what rounding allows."
        )
    return result


class _PairRun:
    """What the cases of a pair share."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.weights = {n: np.asarray(a, np.float64) for n, a in named_arrays(pair.weights).items()}
        trained = {n: p for n, p in pair.torch_module().named_parameters() if p.requires_grad}
        self.map = RuleMap(
            pair.rules,
            {path: array.shape for path, array in self.weights.items()},
            {name: tuple(parameter.shape) for name, parameter in trained.items()},
        )
        self.torch_weights = self.map.to_torch(self.weights)
        self.coefficients = dict(pair.coefficients or {})
        self.references = functools.cache(self._references)

    def training_batch_norm(self) -> str | None:
        """Name of the first module whose result depends on the rest of its batch."""
        for name, module in self.pair.torch_module().named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
                module.training or module.running_mean is None
            ):
                return name or type(module).__name__
        return None

    def not_finite(self) -> str | None:
        """Where an undivided float64 run is not finite, in words."""
        (_, ours), (_, theirs) = self.references(self.pair.optimizers[0])
        return first_nonfinite(ours, "JAX") or first_nonfinite(theirs, "PyTorch")

    def models_differ(self) -> str | None:
        """The first difference between the undivided float64 runs, in words."""
        from jax_accum.crosscheck.summary import in_words

        ours, theirs = (References(*runs) for runs in self.references(self.pair.optimizers[0]))
        findings = judge("float64", ours.float64, theirs.float64, ours, theirs, {})
        failure = first_failure([f for f in findings if f.side == "JAX vs PyTorch"])
        if failure is None:
            return None
        return in_words(Finding(**vars(failure) | {"side": UNDIVIDED}))

    def compare(self, case: PairCase) -> tuple[list[Finding], str | None]:
        """Findings of a case, and the first difference in words."""
        from jax_accum.crosscheck.summary import in_words

        ours, theirs = self.references(case.optimizer)
        jax_trace = self.jax(case)
        try:
            torch_trace = self.torch(case)
        except FloatingPointError as error:
            failed = Finding("gradient", "PyTorch", 0, float("nan"), 1.0)
            return [failed], str(error)
        sizes = [examples_in(batch, i) for i, batch in enumerate(self.pair.batches)]
        counters = {
            "microbatches": case.microbatches * len(sizes),
            "examples": sum(sizes),
            "attempts": len(sizes),
            "updates": len(sizes),
        }
        findings = judge(
            case.dtype, jax_trace, torch_trace, References(*ours), References(*theirs), counters
        )
        findings = [_with_room(finding, case.dtype) for finding in findings]
        for side, trace in (("JAX", jax_trace), ("PyTorch", torch_trace)):
            problem = first_nonfinite(trace, side)
            if problem is not None:
                return findings, problem
        failure = first_failure(findings)
        return findings, None if failure is None else in_words(failure)

    def _references(self, optimizer: str) -> tuple[tuple[Trace, Trace], tuple[Trace, Trace]]:
        """Undivided runs, (float32, float64) of each framework."""
        dtypes = ("float32", "float64")
        ours = [self.jax_undivided(optimizer, dtype) for dtype in dtypes]
        theirs = [self.torch_undivided(optimizer, dtype) for dtype in dtypes]
        return (ours[0], ours[1]), (theirs[0], theirs[1])

    # JAX

    def recipe(self, optimizer: str) -> Recipe:
        """Equal recipes share what they compile."""
        return Recipe(self.pair.jax_loss, optimizer, False, tuple(self.coefficients.items()))

    def jax_undivided(self, optimizer: str, dtype: str) -> Trace:
        """Whole batches."""
        recipe, trace = self.recipe(optimizer), Trace()
        with jax.enable_x64(dtype == "float64"):
            params = self.start(dtype)
            state = recipe.inner().init(params)
            for batch in self.pair.batches:
                loss, gradient = whole_gradient(recipe)(
                    params, pair_ways.arrays_of(batch, dtype), 1.0
                )
                params, state = apply_inner(recipe)(params, state, gradient)
                found = named_arrays(gradient)
                trace.add(float(loss), tree_norm(found), found, named_arrays(params))
        return trace

    def jax(self, case: PairCase) -> Trace:
        """Batches cut into microbatches."""
        recipe, trace = self.recipe(case.optimizer), Trace()
        with jax.enable_x64(case.dtype == "float64"):
            params = self.start(case.dtype)
            update = pair_ways.across if case.way == "across" else pair_ways.in_one
            state: Any = None
            for batch in self.pair.batches:
                arrays = pair_ways.arrays_of(batch, case.dtype)
                params, state, loss = update(recipe, case.microbatches, params, state, arrays)
                found = named_arrays(tapped(state))
                trace.add(loss, tree_norm(found), found, named_arrays(params))
            trace.counters = ja.counts(state)
        return trace

    def start(self, dtype: str) -> Any:
        """The initial parameters, a tree like the pair's weights."""
        arrays = {path: jnp.asarray(array, dtype) for path, array in self.weights.items()}
        return rebuilt(self.pair.weights, arrays)

    # PyTorch

    def module(self, dtype: str) -> nn.Module:
        """The module with the initial weights."""
        module = self.pair.torch_module().to(getattr(torch, dtype))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in self.torch_weights:
                    parameter.copy_(torch.from_numpy(self.torch_weights[name]))
        return module

    def torch_loss(self, module: Any, batch: Any) -> dict[str, Weighted]:
        """The pair's PyTorch loss as terms."""
        terms = self.pair.torch_loss(module, batch)
        terms = terms if isinstance(terms, Mapping) else {"loss": terms}
        return {n: Weighted(total, torch.as_tensor(weight)) for n, (total, weight) in terms.items()}

    def torch_undivided(self, optimizer: str, dtype: str) -> Trace:
        """Whole batches."""
        module, trace = self.module(dtype), Trace()
        torch_optimizer, scheduler, clip_norm = make_optimizer(module, optimizer)
        for batch in self.pair.batches:
            found = undivided(
                module,
                self.torch_loss,
                pair_ways.tensors_of(batch, dtype),
                coefficients=self.coefficients,
                dtype=None,
            )
            for name, parameter in module.named_parameters():
                if name in found.gradients:
                    parameter.grad = torch.from_numpy(found.gradients[name])
            norm, first = gradient_norm(module), self.map.to_jax(gradients(module))
            if clip_norm is not None:
                clip_gradients(module, clip_norm, norm)
            torch_optimizer.step()
            if scheduler is not None:
                scheduler.step()
            trace.add(found.loss, norm, first, self.map.to_jax(parameters(module)))
        return trace

    def torch(self, case: PairCase) -> Trace:
        """The reference's accumulation loop."""
        module, trace, counts = self.module(case.dtype), Trace(), Counts()
        optimizer, scheduler, clip_norm = make_optimizer(module, case.optimizer)
        options = {"coefficients": self.coefficients}
        for batch in self.pair.batches:
            tensors = pair_ways.tensors_of(batch, case.dtype)
            size = len(next(iter(tensors.values()))) // case.microbatches
            cut = [
                {name: tensor[i * size : (i + 1) * size] for name, tensor in tensors.items()}
                for i in range(case.microbatches)
            ]
            first: Arrays = {}
            if not trace.losses:
                accumulate(module, self.torch_loss, cut, **options)  # type: ignore[arg-type]
                first = self.map.to_jax(gradients(module))
            attempt = update(
                module,
                optimizer,
                self.torch_loss,
                cut,
                scheduler=scheduler,
                clip_norm=clip_norm,
                counts=counts,
                **options,  # type: ignore[arg-type]
            )
            after = self.map.to_jax(parameters(module))
            trace.add(attempt.group.loss, attempt.group.grad_norm, first, after)
        trace.counters = counts.as_dict()
        return trace


def _with_room(finding: Finding, dtype: str) -> Finding:
    """One parameter alone has `PARAMETER_FACTOR` more room in float32 than the whole gradient."""
    if finding.parameter is None or dtype != "float32" or finding.side == UNDIVIDED:
        return finding
    return replace(finding, allowed=finding.allowed * PARAMETER_FACTOR)


def first_nonfinite(trace: Trace, side: str) -> str | None:
    """Where a run first held an inf or a NaN, in words: of the first gradient, then by update."""
    for path, array in trace.gradient.items():
        if not np.isfinite(array).all():
            return f"the gradient of {path} at update 1 ({side}) is not finite"
    for number, (loss, arrays) in enumerate(zip(trace.losses, trace.parameters, strict=True), 1):
        if not np.isfinite(loss):
            return f"the loss at update {number} ({side}) is not finite"
        for path, array in arrays.items():
            if not np.isfinite(array).all():
                return f"{path} after update {number} ({side}) is not finite"
    return None

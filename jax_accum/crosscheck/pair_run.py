"""The check of a pair: map, models, then accumulation, and where the first difference lies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from jax_accum.crosscheck.compare import (
    UNDIVIDED,
    Finding,
    References,
    first_failure,
    judge,
    worst,
)
from jax_accum.crosscheck.pair_jax import JaxRuns
from jax_accum.crosscheck.pair_torch import TorchRuns
from jax_accum.crosscheck.pairs import Pair, PairCase, examples_in, pair_cases
from jax_accum.crosscheck.rules import RuleMap, named_arrays
from jax_accum.crosscheck.trace import Trace

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
        weights = {n: np.asarray(a, np.float64) for n, a in named_arrays(pair.weights).items()}
        trained = {n: p for n, p in pair.torch_module().named_parameters() if p.requires_grad}
        mapping = RuleMap(
            pair.rules,
            {path: array.shape for path, array in weights.items()},
            {name: tuple(parameter.shape) for name, parameter in trained.items()},
        )
        self.jax = JaxRuns(pair, weights)
        self.torch = TorchRuns(pair, mapping, mapping.to_torch(weights))
        self.undivided = functools.cache(self._undivided)
        self.pieces = functools.cache(self._pieces)

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
        (_, ours), (_, theirs) = self.undivided(self.pair.optimizers[0])
        return first_nonfinite(ours, "JAX") or first_nonfinite(theirs, "PyTorch")

    def models_differ(self) -> str | None:
        """The first difference between the undivided float64 runs, in words."""
        from jax_accum.crosscheck.summary import in_words

        ours, theirs = (References(*runs) for runs in self.undivided(self.pair.optimizers[0]))
        findings = judge("float64", ours.float64, theirs.float64, ours, theirs, {})
        failure = first_failure([f for f in findings if f.side == "JAX vs PyTorch"])
        if failure is None:
            return None
        return in_words(Finding(**vars(failure) | {"side": UNDIVIDED}))

    def compare(self, case: PairCase) -> tuple[list[Finding], str | None]:
        """Findings of a case, and the first difference in words."""
        from jax_accum.crosscheck.summary import in_words

        jax_trace = self.jax.accumulated(case)
        try:
            torch_trace = self.torch.accumulated(case)
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
        ours, theirs = (
            References(*whole, pieces=pieces)
            for whole, pieces in zip(
                self.undivided(case.optimizer),
                self.pieces(case.optimizer, case.microbatches),
                strict=True,
            )
        )
        findings = judge(case.dtype, jax_trace, torch_trace, ours, theirs, counters)
        for side, trace in (("JAX", jax_trace), ("PyTorch", torch_trace)):
            problem = first_nonfinite(trace, side)
            if problem is not None:
                return findings, problem
        failure = first_failure(findings)
        return findings, None if failure is None else in_words(failure)

    def _undivided(self, optimizer: str) -> tuple[tuple[Trace, Trace], ...]:
        """Whole batches, (float32, float64) of each framework."""
        sides = (self.jax, self.torch)
        return tuple(
            (side.undivided(optimizer, "float32"), side.undivided(optimizer, "float64"))
            for side in sides
        )

    def _pieces(self, optimizer: str, microbatches: int) -> tuple[tuple[Trace, Trace], ...]:
        """Microbatches put together exactly, (float32, float64) of each framework.

        Compilers sum up few rows in another order than many: XLA's rounding on a CPU can be ten
        times larger for 8 rows than for 32, accumulated or not. The undivided batch does not show.
        """
        sides = (self.jax, self.torch)
        return tuple(
            (
                side.pieces(optimizer, microbatches, "float32"),
                side.pieces(optimizer, microbatches, "float64"),
            )
            for side in sides
        )


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

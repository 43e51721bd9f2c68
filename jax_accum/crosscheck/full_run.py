"""A case of the full matrix: both sides run on the same rows, then judged."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_accum.crosscheck import full_jax, full_torch, full_ways
from jax_accum.crosscheck.compare import Finding, References, judge
from jax_accum.crosscheck.data import Example
from jax_accum.crosscheck.full_data import (
    INITIAL_SCALE,
    RowGroup,
    expected_counters,
    expected_scales,
    full_groups,
    pad_rows,
)
from jax_accum.crosscheck.jax_recipe import apply_inner
from jax_accum.crosscheck.maps import (
    Arrays,
    Entry,
    ParameterMap,
    flatten,
    initial_weights,
    unflatten,
)
from jax_accum.crosscheck.matrix import DEVICE_WAYS, EXAMPLES_PER_UPDATE, REPLICAS, FullCase
from jax_accum.crosscheck.trace import Trace, tree_norm
from torch_ref.launch import spawn

Tree = Any
DDP_SECONDS = 240.0
MAP = ParameterMap(
    [
        Entry("tok_emb/embedding", "tok_emb.weight"),
        Entry("mix/kernel", "mix.weight", transposed=True),
        Entry("mix/bias", "mix.bias"),
        Entry("norm/scale", "norm.weight"),
        Entry("norm/bias", "norm.bias"),
        Entry("head/kernel", "head.weight", transposed=True),
    ]
)
# Two programs with collectives, started from two threads on the same devices, can wait for each
# other for ever.
_devices_taken = threading.Lock()


class ProcessesError(Exception):
    """The PyTorch processes of a case died, raised or did not end in time."""


class FullMatrix:
    """What the cases of the full matrix share: rows, weights, undivided runs, two processes.

    Args:
      examples: of the text, in order.
      seed: of the weights.
      planned: the cases that will be asked for: those in two processes run in one go.
    """

    def __init__(self, examples: Sequence[Example], seed: int, planned: Sequence[FullCase]) -> None:
        self.examples = examples
        self.weights = initial_weights(full_jax.SHAPES, seed)
        self.torch_weights = MAP.to_torch(self.weights)
        self.planned = [case for case in planned if case.torch == "ddp"]
        self._references: dict[Any, tuple[Trace, Trace]] = {}
        self._locks: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)
        self._ddp_lock = threading.Lock()
        self._ddp: dict[FullCase, Trace] = {}
        self._ddp_failed: str | None = None

    def groups(self, case: FullCase) -> list[RowGroup]:
        """The attempts of a case."""
        return full_groups(case, self.examples)

    def findings(
        self, case: FullCase, fault: Any = None
    ) -> tuple[list[Finding], Trace, Trace, References, References, dict[str, dict[str, int]]]:
        """Runs one case on both sides and judges it."""
        groups = self.groups(case)
        jax_refs, torch_refs = self.references(case, groups)
        ours, theirs = self.run_jax(case, groups, fault), self.run_torch(case, groups, fault)
        # A planted loop runs on one device, and counts as loops do.
        planted = fault is not None and fault.side == "JAX"
        compiled = case.way in ("inone", "jit", "pmap") and not planted
        replicas = 1 if planted else case.jax_replicas
        expected = expected_counters(groups, case.microbatches, replicas, to_last_weight=compiled)
        torch_expected = expected_counters(
            groups, case.microbatches, case.torch_replicas, to_last_weight=False
        )
        if case.torch == "ddp":
            reduced = sum(group.skip != "empty" for group in groups)
            torch_expected["gradient reductions"] = reduced
        scales = expected_scales(groups) if case.dtype == "float16" else None
        findings = judge(
            case.dtype, ours, theirs, jax_refs, torch_refs, expected, torch_expected, scales
        )
        counters = {
            "JAX": ours.counters,
            "PyTorch": theirs.counters,
            "expected": expected,
            "expected of PyTorch": torch_expected,
        }
        return findings, ours, theirs, jax_refs, torch_refs, counters

    def run_jax(self, case: FullCase, groups: Sequence[RowGroup], fault: Any = None) -> Trace:
        """The accumulated run in JAX."""
        recipe = full_jax.case_recipe(case.optimizer, case.dtype, case.terms)
        if fault is not None and fault.side == "JAX":
            return _train(fault.full_loop(case, recipe), self.weights, groups, case.dtype)
        way = full_ways.make_way(case.way, recipe, case.microbatches)
        if case.way in DEVICE_WAYS:
            with _devices_taken:
                return _train(way, self.weights, groups, case.dtype)
        return _train(way, self.weights, groups, case.dtype)

    def run_torch(self, case: FullCase, groups: Sequence[RowGroup], fault: Any = None) -> Trace:
        """The accumulated run in PyTorch, under JAX paths."""
        if fault is not None and fault.side == "PyTorch":
            trace = fault.full_trace(case, self.torch_weights, groups)
        elif case.torch == "ddp":
            trace = self._in_two_processes(case)
        else:
            trace = full_torch.run_loop(case, self.torch_weights, groups)
        return _under_jax_paths(trace)

    def _in_two_processes(self, case: FullCase) -> Trace:
        """The run of a case; with the first that is asked for, all that are planned are run.

        Raises:
          ProcessesError: they did not end well; every case hears the same.
        """
        with self._ddp_lock:
            if self._ddp_failed is not None:
                raise ProcessesError(self._ddp_failed)
            if case not in self._ddp:
                cases = list(dict.fromkeys([*self.planned, case]))
                jobs = [full_torch.Job(c, self.torch_weights, tuple(self.groups(c))) for c in cases]
                try:
                    results = spawn(full_torch.run_jobs, REPLICAS, jobs, timeout=DDP_SECONDS)
                except (RuntimeError, TimeoutError) as error:
                    self._ddp_failed = str(error)
                    raise ProcessesError(self._ddp_failed) from error
                for one, *traces in zip(cases, *results, strict=True):
                    _require_alike(one, traces)
                    self._ddp[one] = traces[0]
            return self._ddp[case]

    def references(
        self, case: FullCase, groups: Sequence[RowGroup]
    ) -> tuple[References, References]:
        """Undivided runs of both frameworks: in the case's own precision, and in float64."""
        low = "float32" if case.dtype == "float64" else case.dtype
        skips = tuple(group.skip for group in groups)
        runs = [self._undivided(case, dtype, groups) for dtype in (low, "float64")]
        (jax_low, torch_low), (jax_high, torch_high) = runs
        return References(jax_low, jax_high, skips), References(torch_low, torch_high, skips)

    def _undivided(
        self, case: FullCase, dtype: str, groups: Sequence[RowGroup]
    ) -> tuple[Trace, Trace]:
        masks = tuple(group.arrays["mask"].tobytes() for group in groups)
        skips = tuple(group.skip for group in groups)
        key = (case.optimizer, case.terms, dtype, masks, skips)
        with self._locks[key]:
            if key not in self._references:
                recipe = full_jax.case_recipe(case.optimizer, dtype, case.terms)
                ours = _train_undivided(recipe, self.weights, groups, dtype)
                theirs = full_torch.run_undivided(case, dtype, self.torch_weights, groups)
                self._references[key] = ours, _under_jax_paths(theirs)
            return self._references[key]


def _train(loop: Any, weights: Arrays, groups: Sequence[RowGroup], dtype: str) -> Trace:
    """Trains in JAX from the given weights, one attempt per group."""
    trace = Trace()
    with jax.enable_x64(dtype == "float64"):
        params = _start(weights, dtype)
        state = loop.start(params)
        for group in groups:
            scale = float(loop.recipe.scale_of(state))
            params, state, seen = loop.update(params, state, group)
            # Copies: the next update may write over what it is given.
            gradient = _numpy(seen.gradient)
            norm = tree_norm(gradient) if seen.norm is None else float(seen.norm)
            trace.add(float(seen.loss), norm, gradient, _numpy(params))
            trace.scales.append(scale)
        trace.counters = loop.counters(state)
    return trace


def _train_undivided(
    recipe: full_jax.Recipe, weights: Arrays, groups: Sequence[RowGroup], dtype: str
) -> Trace:
    """Whole batches in JAX; groups that are to be skipped are left out."""
    trace = Trace()
    scale = np.float32(INITIAL_SCALE if recipe.scaled else 1.0)
    with jax.enable_x64(dtype == "float64"):
        params = _start(weights, dtype)
        state = recipe.inner().init(params)
        for group in groups:
            if group.skip is not None:
                trace.add(0.0, 0.0, {}, _numpy(params))
                continue
            batch = pad_rows(group.arrays, EXAMPLES_PER_UPDATE)
            loss, gradient = full_jax.whole_gradient(recipe)(params, batch, scale)
            params, state = apply_inner(recipe)(params, state, gradient)
            trace.add(float(loss), tree_norm(_numpy(gradient)), _numpy(gradient), _numpy(params))
    return trace


def _start(weights: Arrays, dtype: str) -> Tree:
    wide = "float64" if dtype == "float64" else "float32"
    return unflatten({path: jnp.asarray(array, wide) for path, array in weights.items()})


def _numpy(tree: Tree) -> Arrays:
    return {path: np.array(leaf) for path, leaf in flatten(tree).items()}


def _under_jax_paths(trace: Trace) -> Trace:
    gradient = MAP.to_jax(trace.gradient) if trace.gradient else {}
    after = [MAP.to_jax(arrays) for arrays in trace.parameters]
    return Trace(trace.losses, trace.norms, gradient, after, trace.counters, trace.scales)


def _require_alike(case: FullCase, traces: Sequence[Trace]) -> None:
    """Replicas that came apart are a fault that no comparison of one of them would see."""
    first, *others = traces
    for other in others:
        for one, two in zip(first.parameters, other.parameters, strict=True):
            if any(not np.array_equal(one[name], two[name]) for name in one):
                raise ProcessesError(f"the replicas of {case.name} came apart")

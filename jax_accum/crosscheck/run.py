"""The run: both sides trained on the same examples from the same weights, case by case."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property, partial

from jax_accum.crosscheck import jax_side
from jax_accum.crosscheck.cases import DTYPES, Case
from jax_accum.crosscheck.compare import Finding, References, first_failure, judge, worst
from jax_accum.crosscheck.data import WINDOW, Document, Group, make_groups, ordered_examples
from jax_accum.crosscheck.faults import Fault
from jax_accum.crosscheck.full_run import FullMatrix, ProcessesError
from jax_accum.crosscheck.gpt import GPTSizes, parameter_shapes
from jax_accum.crosscheck.jax_recipe import JaxRecipe
from jax_accum.crosscheck.maps import gpt_map, initial_weights
from jax_accum.crosscheck.matrix import ATTEMPTS, EXAMPLES_PER_UPDATE, AnyCase, FullCase
from jax_accum.crosscheck.torch_side import TorchSide, one_thread
from jax_accum.crosscheck.trace import Trace, expected_counters

SIZES = GPTSizes(max_length=WINDOW)
# Nearly all of the time is XLA's compiler, one program on one core: two cases keep two cores busy.
WORKERS = min(2, os.cpu_count() or 1)


Key = tuple[str, tuple[int, ...]]
Plain = tuple[tuple[Trace, Trace], tuple[Trace, Trace]]


@dataclass(frozen=True)
class CaseResult:
    """What one case came to.

    Args:
      case: the case.
      findings: every quantity that was compared, in the order of the run.
      jax: loss of each group by name of the run: accumulated and undivided float64.
      torch: the same of PyTorch.
      tokens: supervised tokens of each group.
      counters: of JAX, of PyTorch and as expected.
      seconds: wall-clock time, compilation included.
      trouble: what kept the case from being compared, in words; empty where nothing did.
    """

    case: AnyCase
    findings: list[Finding]
    jax: dict[str, list[float]]
    torch: dict[str, list[float]]
    tokens: list[int]
    counters: dict[str, dict[str, int]]
    seconds: float
    trouble: str = ""

    @property
    def equal(self) -> bool:
        """Whether every quantity is within its tolerance."""
        return self.failure is None

    @cached_property
    def failure(self) -> Finding | None:
        """The first quantity that left its tolerance."""
        return first_failure(self.findings)

    @cached_property
    def worst(self) -> Finding:
        """The quantity that is furthest out, or came nearest to it."""
        return worst(self.findings)

    @property
    def parameters(self) -> list[Finding]:
        """How far JAX's and PyTorch's first gradients are apart, by parameter."""
        return [f for f in self.findings if f.parameter and f.side == "JAX vs PyTorch"]


@dataclass
class Crosscheck:
    """Everything that the cases share: text, weights, and the undivided runs.

    Args:
      documents: the text.
      updates: optimizer updates of each run.
      seed: of the initial weights and of the order of the examples.
      fault: planted on one side, or none.
      sizes: of both models.
      results: of the cases that `compare_all` was given.

    Raises:
      InputError: the text gives no examples.
    """

    documents: Sequence[Document]
    updates: int
    seed: int = 0
    fault: Fault | None = None
    sizes: GPTSizes = SIZES
    results: list[CaseResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._references: dict[Key, Plain] = {}
        self._stop = threading.Event()
        self._full: FullMatrix | None = None
        self._locks: defaultdict[Key, threading.Lock] = defaultdict(threading.Lock)
        self.examples = ordered_examples(self.documents, self.seed)
        make_groups(self.examples, [1])
        mapping = gpt_map(self.sizes)
        self.weights = initial_weights(parameter_shapes(self.sizes), self.seed)
        self.torch = TorchSide(self.sizes, mapping, self.weights)

    def compare_all(
        self, cases: Sequence[AnyCase], done: Callable[[CaseResult], None] = lambda result: None
    ) -> None:
        """Compares the cases, a few at a time, and keeps what they come to in ``results``.

        Args:
          cases: in the order that ``results`` will have.
          done: called after each case.

        Raises:
          KeyboardInterrupt: interrupted; ``results`` hold the cases that were done by then.
        """
        found: dict[AnyCase, CaseResult] = {}
        self.full([case for case in cases if isinstance(case, FullCase)])
        pool = ThreadPoolExecutor(WORKERS)
        try:
            with one_thread():
                for future in as_completed([pool.submit(self.compare, case) for case in cases]):
                    result = future.result()
                    found[result.case] = result
                    done(result)
        except BaseException:
            self._stop.set()
            raise
        finally:
            self.results += [found[case] for case in cases if case in found]
            pool.shutdown(wait=False, cancel_futures=True)

    def compare(self, case: AnyCase) -> CaseResult:
        """Runs one case on both sides and judges it."""
        if isinstance(case, FullCase):
            return self._compare_full(case)
        started = time.perf_counter()
        groups = self.groups(case)
        jax_refs, torch_refs = self.references(case, groups)
        self._check_stop()
        jax_trace = jax_side.run(self._loop(case), self.weights, groups, case.dtype)
        self._check_stop()
        # The reference's two orders of division, one beside each of JAX's ways.
        order = "first" if case.way == "inone" else "last"
        torch_trace = self.torch.accumulated(
            groups, case.optimizer, case.dtype, case.microbatch_size, order
        )
        counters = expected_counters(groups, case.microbatch_size)
        findings = judge(case.dtype, jax_trace, torch_trace, jax_refs, torch_refs, counters)
        return CaseResult(
            case,
            findings,
            _losses(jax_trace, jax_refs),
            _losses(torch_trace, torch_refs),
            [group.tokens for group in groups],
            {"JAX": jax_trace.counters, "PyTorch": torch_trace.counters, "expected": counters},
            time.perf_counter() - started,
        )

    def _compare_full(self, case: FullCase) -> CaseResult:
        started = time.perf_counter()
        self._check_stop()
        full = self.full([case])
        tokens = [group.tokens for group in full.groups(case)]
        try:
            findings, ours, theirs, jax_refs, torch_refs, counters = full.findings(case, self.fault)
        except ProcessesError as failed:
            findings = [Finding("end of the PyTorch processes", "PyTorch", 0, float("inf"), 0.0)]
            seconds = time.perf_counter() - started
            return CaseResult(case, findings, {}, {}, tokens, {}, seconds, str(failed))
        return CaseResult(
            case,
            findings,
            _losses(ours, jax_refs),
            _losses(theirs, torch_refs),
            tokens,
            counters,
            time.perf_counter() - started,
        )

    def full(self, planned: Sequence[FullCase]) -> FullMatrix:
        """What the cases of the full matrix share; ``planned`` counts the first time."""
        with self._locks[("full", ())]:
            if self._full is None:
                self._full = FullMatrix(self.examples, self.seed, planned)
            return self._full

    def examples_of(self, case: AnyCase) -> int:
        """How many examples a case takes from the text."""
        if isinstance(case, FullCase):
            return EXAMPLES_PER_UPDATE * (ATTEMPTS - 1) + case.last_examples
        return sum(len(group.examples) for group in self.groups(case))

    def _check_stop(self) -> None:
        """Ends a case that nobody waits for any more: the process could not end before it."""
        if self._stop.is_set():
            raise CancelledError

    def groups(self, case: Case) -> list[Group]:
        """The examples of each update of a case."""
        sizes = [case.examples_per_update] * (self.updates - 1) + [case.last_examples]
        return make_groups(self.examples, sizes)

    def references(self, case: Case, groups: Sequence[Group]) -> tuple[References, References]:
        """Plain runs of JAX and of PyTorch, of whole batches and at the size of a microbatch."""
        wholes = self._plain(case, groups, case.examples_per_update)
        if case.microbatches == 1:
            return References(*wholes[0]), References(*wholes[1])
        pieces = self._plain(case, groups, case.microbatch_size)
        return (
            References(*wholes[0], pieces=pieces[0]),
            References(*wholes[1], pieces=pieces[1]),
        )

    def _plain(self, case: Case, groups: Sequence[Group], size: int) -> Plain:
        """Runs of (float32, float64) of each framework: one set for all cases with these groups."""
        key = (case.optimizer, (size, *(len(group.examples) for group in groups)))
        with self._locks[key]:
            if key not in self._references:
                recipe, weights = JaxRecipe(self.sizes, case.optimizer), self.weights
                if size == case.examples_per_update:
                    loop: jax_side.Loop = jax_side.Undivided(recipe, size)
                    run_torch = self.torch.undivided
                else:
                    loop = jax_side.Pieces(recipe, size)
                    run_torch = partial(self.torch.pieces, microbatch_size=size)
                ours = [jax_side.run(loop, weights, groups, dtype) for dtype in DTYPES]
                theirs = [run_torch(groups, case.optimizer, dtype) for dtype in DTYPES]
                self._references[key] = (ours[0], ours[1]), (theirs[0], theirs[1])
            return self._references[key]

    def _loop(self, case: Case) -> jax_side.Loop:
        if self.fault is not None and self.fault.side == "JAX":
            return self.fault.loop(case, self.sizes)
        recipe = JaxRecipe(self.sizes, case.optimizer)
        return jax_side.WAYS[case.way](recipe, case.microbatches, case.microbatch_size)


def _losses(trace: Trace, refs: References) -> dict[str, list[float]]:
    return {"accumulated": trace.losses, "undivided float64": refs.float64.losses}

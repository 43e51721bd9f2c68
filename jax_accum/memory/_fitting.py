"""fitting_step: a step that takes a smaller microbatch when memory runs out, and repeats itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import jax

from jax_accum._checks import checked_int
from jax_accum._plan import BatchPlan
from jax_accum.memory._analyze import Analysis, analyze
from jax_accum.memory._errors import DoesNotFitError, is_exhausted
from jax_accum.memory._kept import Kept, is_lost
from jax_accum.memory._processes import EXHAUSTED, FAILED, OK, Processes
from jax_accum.memory._regroup import regroup
from jax_accum.memory._rehearse import rehearse
from jax_accum.memory._search import divisors

Tree = Any


class Record(Protocol):
    """What is told of changes; a `RunRecord` is one."""

    trials: list[dict[str, str]]

    def change_plan(self, plan: BatchPlan, examples: int) -> None:
        """Takes note that the run goes on in another partition."""


class FittingStep:
    """What `fitting_step` returns.

    Attributes:
      plan: the present one.
      changes: each change so far: the examples trained before it, the plans before and after.
    """

    def __init__(
        self,
        make: Callable[[BatchPlan], Any],
        plan: BatchPlan,
        *,
        watch: str,
        max_tries: int,
        grouped: bool,
        record: Record | None,
        timeout: float,
        rehearsal: Callable[[Analysis], None],
    ) -> None:
        self.plan = plan
        self.changes: list[tuple[int, BatchPlan, BatchPlan]] = []
        self._make = make
        self._first = plan
        self._watch = watch
        self._max_tries = max_tries
        self._grouped = grouped
        self._record = record
        self._rehearsal = rehearsal
        self._processes = Processes(timeout)
        self._proven: set[int] = set()
        self._made: tuple[int, Any] | None = None
        self._examples = 0

    def __call__(self, params: Tree, opt_state: Any, batch: Tree, *args: Any, **kwargs: Any) -> Any:
        """Makes one update, in smaller microbatches if it must."""
        tried: list[int] = []
        watched = self._watch == "every" or self.plan.microbatch_size not in self._proven
        kept = Kept((params, opt_state)) if watched else None
        while True:
            m = self.plan.microbatch_size
            watched = self._watch == "every" or m not in self._proven
            given = regroup(batch, self._first, self.plan) if self._grouped else batch
            result, error = self._attempt(watched, params, opt_state, given, args, kwargs)
            if error is None:
                self._proven.add(m)
                self._examples += self.plan.examples_per_update
                return result
            said = (str(error).splitlines() or [type(error).__name__])[0][:200]
            # Its traceback holds the frames of the attempt, and with them its arrays.
            del error, given
            gc.collect()
            if self._record is not None:
                self._record.trials.append({"what": f"microbatch size {m}", "outcome": said})
            tried.append(m)
            if kept is not None:
                params, opt_state = kept.restored((params, opt_state))
            elif any(map(is_lost, jax.tree.leaves((params, opt_state)))) or self._several:
                raise DoesNotFitError(
                    f"memory ran out at microbatch size {m}, which had fitted before, and nothing "
                    f"was kept to go back to ({said}). Load the last checkpoint, and use "
                    "watch='every', which keeps a copy on the host before every update."
                )
            else:
                kept = Kept((params, opt_state))
            self._shrink(tried, said)

    @property
    def _several(self) -> bool:
        return self._processes.count > 1

    def _attempt(
        self, watched: bool, params: Tree, opt_state: Any, batch: Tree, args: Any, kwargs: Any
    ) -> tuple[Any, BaseException | None]:
        """The result, or the error by which memory ran out here or in another process."""
        agreeing = watched and self._several

        def rehearsed() -> None:
            if hasattr(self._step(), "lower"):
                what = analyze(self._step(), params, opt_state, batch, *args, **kwargs)
                self._rehearsal(what)

        def run() -> Any:
            result = self._step()(params, opt_state, batch, *args, **kwargs)
            return jax.block_until_ready(result) if watched else result

        if agreeing:
            # A process that cannot start must be known before any other waits for it.
            _, error = self._caught(rehearsed, agreeing)
            if error is not None:
                return None, error
        return self._caught(run, agreeing)

    def _caught(
        self, action: Callable[[], Any], agreeing: bool
    ) -> tuple[Any, BaseException | None]:
        result, error, status = None, None, OK
        try:
            result = action()
        except Exception as caught:
            error, status = caught, EXHAUSTED if is_exhausted(caught) else FAILED
        if agreeing:
            try:
                others = self._processes.agree(status)
            except TimeoutError:
                if status == FAILED and error is not None:
                    raise error from None  # the cause, and not that others are gone
                raise
            if EXHAUSTED in others:
                where = others.index(EXHAUSTED)
                return None, error or MemoryError(f"memory ran out in process {where}")
            if FAILED in others and error is None:
                raise RuntimeError(
                    f"the attempt failed in process {others.index(FAILED)}, not for want of "
                    "memory; see what it says."
                )
        if status == FAILED and error is not None:
            raise error
        return result, error

    def _step(self) -> Any:
        m = self.plan.microbatch_size
        if self._made is None or self._made[0] != m:
            made = self._make(self.plan)
            self._made = (m, made[0] if isinstance(made, tuple) else made)
        return self._made[1]

    def _shrink(self, tried: list[int], said: str) -> None:
        before = self.plan
        smaller = [d for d in divisors(before.examples_per_replica) if d < before.microbatch_size]
        sizes = ", ".join(map(str, tried))
        if not smaller:
            raise DoesNotFitError(
                f"memory ran out at microbatch size {sizes}; there is no smaller one ({said}). "
                "ja.memory.analyze says what takes the memory: accumulation alone is not enough."
            )
        if len(tried) >= self._max_tries:
            raise DoesNotFitError(
                f"memory ran out at microbatch sizes {sizes}: max_tries={self._max_tries} was "
                f"reached ({said}). Start with a smaller one: ja.memory.largest_microbatch finds "
                "it before anything runs."
            )
        self.plan = before.with_microbatch_size(smaller[-1])
        self._made = None
        self.changes.append((self._examples, before, self.plan))
        if self._record is not None:
            self._record.change_plan(self.plan, self._examples)


def fitting_step(
    make: Callable[[BatchPlan], Any],
    plan: BatchPlan,
    *,
    watch: str = "new",
    max_tries: int = 4,
    grouped: bool = False,
    record: Record | None = None,
    timeout: float = 300.0,
    rehearsal: Callable[[Analysis], None] = rehearse,
) -> FittingStep:
    """A training step that answers running out of memory with a smaller microbatch.

    When memory runs out, what the group came to so far is dropped, m becomes the next smaller
    divisor of the examples per replica, A follows, and the same group runs again: the same
    examples, keys and denominators. The update is the one that a run started with that m would
    have made. Nothing of the failed attempt is counted, since counters are in the state.

    A step that donates may lose its arguments to the failure. Before a size has once succeeded,
    the first two arguments are therefore copied to the host, and only what was lost is put back.

    With several processes, each compiles the step and allocates what it will need (a rehearsal)
    before any starts it, and all take the smaller size if one of them cannot; afterwards they
    compare once more. A process that still runs out when the others have begun gives up after
    `timeout`: they wait in a collective, which nothing can call back.

    Args:
      make: `make(plan)` returns the step for a plan, or a tuple that begins with it: what
        `largest_microbatch` is given will do.
      plan: the one to begin with.
      watch: `"new"` copies, waits for the result and compares processes until a size has once
        succeeded, and costs nothing after that. `"every"` does so in every update.
      max_tries: sizes tried for one group, before giving up.
      grouped: batches are grouped already, `[A, m * D, ...]` in `plan`'s partition, and are cut
        anew when it changes.
      record: told of each change (`change_plan`) and of what was tried (`trials`).
      timeout: seconds that processes wait for each other.
      rehearsal: allocates what an `Analysis` says, and frees it; raises if it cannot.

    Returns:
      A function with the arguments and results of the step.

    Raises:
      ValueError: `watch` or `max_tries` out of range.
      DoesNotFitError: from a call: nothing smaller is left, or `max_tries` is reached, or a size
        that had succeeded ran out later and no copy was kept.
      Exception: from a call: whatever the step raises for other reasons.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_accum as ja
      >>> def loss_fn(w, x):
      ...     return ja.Weighted(jnp.sum((w - x) ** 2), x.size)
      >>> tx = optax.sgd(0.5)
      >>> def make(plan):
      ...     if plan.microbatch_size > 2:  # stands for a size that does not fit
      ...         def step(*args):
      ...             raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
      ...         return step
      ...     return ja.make_train_step(loss_fn, tx, plan.microbatches)
      >>> step = ja.memory.fitting_step(make, ja.BatchPlan(microbatch_size=4, microbatches=1))
      >>> w, state, metrics = step(jnp.zeros(()), tx.init(jnp.zeros(())), jnp.arange(4.0))
      >>> float(w), step.plan.microbatch_size, step.plan.microbatches
      (1.5, 2, 2)
    """
    if watch not in ("new", "every"):
        raise ValueError(f"watch must be 'new' or 'every', got {watch!r}.")
    return FittingStep(
        make,
        plan,
        watch=watch,
        max_tries=checked_int(max_tries, "max_tries"),
        grouped=grouped,
        record=record,
        timeout=timeout,
        rehearsal=rehearsal,
    )

"""largest_microbatch: the largest m whose compiled step fits a budget, in few compilations."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jax_accum._plan import BatchPlan
from jax_accum.memory import _advice, _cache
from jax_accum.memory._analyze import ACTIVATIONS, Analysis, compile_and_read, lower
from jax_accum.memory._budget import as_bytes, readable
from jax_accum.memory._errors import DoesNotFitError, is_exhausted
from jax_accum.memory._line import Line, fit

Make = Callable[[BatchPlan], Any]
"""From a plan to a jitted step and the tuple of what it would be called with."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One microbatch size of a search.

    Attributes:
      plan: with this microbatch size; the examples per update are those of all rows.
      peak: bytes on each device; `None` where memory ran out while compiling.
      fits: whether the peak is within the budget.
      how: "compiled", "cached" (compiled in an earlier search) or "predicted" (by the line).
      analysis: of the compiled program; `None` for a prediction.
    """

    plan: BatchPlan
    peak: int | None
    fits: bool
    how: str
    analysis: Analysis | None

    @property
    def flops(self) -> float | None:
        """Of one update on each device: A times what XLA counts for one turn; about."""
        return None if self.analysis is None else self.analysis.flops * self.plan.microbatches


@dataclasses.dataclass(frozen=True)
class Search:
    """What `largest_microbatch` found.

    Attributes:
      plan: the plan with the largest microbatch that fits.
      rows: one for every divisor, by growing microbatch size.
      budget: bytes on each device.
      line: fixed and per-example bytes, fitted through what was compiled. It is of programs that
        accumulate: the undivided batch (A = 1), which keeps no accumulator, needs less as a rule.
      notes: what is worth knowing: few divisors, what dominates.
    """

    plan: BatchPlan
    rows: tuple[Row, ...]
    budget: int
    line: Line
    notes: tuple[str, ...]

    @property
    def chosen(self) -> Row:
        """The row of the plan."""
        return next(row for row in self.rows if row.plan == self.plan)

    @property
    def compilations(self) -> int:
        """Programs that this search compiled."""
        return sum(row.how == "compiled" for row in self.rows)

    def table(self) -> str:
        """The rows as text; a peak with `~` is the line's, and was not compiled."""
        lines = [
            f"{'m':>6} {'A':>6} {'peak':>10}  {'fits':4} {'flops/update':>12} {'compiled in':>11}"
        ]
        for row in self.rows:
            peak = "ran out" if row.peak is None else readable(row.peak)
            if row.how == "predicted":
                peak = f"~{peak}"
            flops = "" if row.flops is None else f"{row.flops:.3g}"
            seconds = "" if row.analysis is None else f"{row.analysis.compile_seconds:.1f} s"
            mark = " <-" if row.plan == self.plan else ""
            lines.append(
                f"{row.plan.microbatch_size:>6} {row.plan.microbatches:>6} {peak:>10}  "
                f"{'yes' if row.fits else 'no':4} {flops:>12} "
                f"{'(cached)' if row.how == 'cached' else seconds:>11}{mark}"
            )
        return "\n".join(lines)


def largest_microbatch(
    make: Make,
    plan: BatchPlan,
    budget: int | str | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[Row], None] | None = None,
    device: jax.Device | None = None,
) -> Search:
    """The plan with the largest microbatch whose step fits a budget of memory, without running it.

    All m that divide the examples per replica are candidates; A follows, so that every plan
    trains the same examples per update. The smallest is compiled first. A line of fixed and
    per-example memory then predicts the largest that fits, and a compilation confirms or corrects
    it, until the answer and its next larger neighbour are both known.

    Args:
      make: `make(plan)` returns `(step, args)`: a jitted step for that plan, and what it would be
        called with; `jax.ShapeDtypeStruct`s will do, so that no array is needed.
      plan: any plan with the right examples per update and replicas.
      budget: bytes on each device, `"16GiB"`, or `"80%"` of the device; all of it if not given.
      cache: folder in which analyses are kept, by program and versions. None is kept without it.
      progress: called with each row as soon as it is known.
      device: the device that a percentage is taken of; the first local one by default.

    Returns:
      A `Search`: its `plan`, and a `table()` of all candidates.

    Raises:
      DoesNotFitError: the smallest microbatch does not fit. Says what takes the memory and what
        would help; accumulation alone cannot.
      TypeError: `make` does not return a jitted step and a tuple.
      ValueError: the budget cannot be read, or is to be taken from a device that does not tell.
      Exception: whatever compiling raises for reasons other than memory.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_accum as ja
      >>> def loss_fn(w, x):
      ...     return ja.Weighted(jnp.sum(jnp.tanh(x @ w) ** 2), len(x))
      >>> w, x = jax.ShapeDtypeStruct((8, 512), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
      >>> tx = optax.sgd(0.1)
      >>> def make(plan):
      ...     step = ja.make_train_step(loss_fn, tx, plan.microbatches)
      ...     return step, (w, jax.eval_shape(tx.init, w), x)
      >>> plan = ja.BatchPlan(microbatch_size=1, microbatches=16)
      >>> found = ja.memory.largest_microbatch(make, plan, "1 MiB")
      >>> found.plan.microbatch_size, found.plan.microbatches
      (16, 1)
    """
    limit = as_bytes(budget, device)
    folder = None if cache is None else Path(cache)
    sizes = divisors(plan.examples_per_replica)
    known: dict[int, Row] = {}

    def look(i: int) -> Row:
        row = _compiled_row(make, plan.with_microbatch_size(sizes[i]), limit, folder)
        known[sizes[i]] = row
        if progress is not None:
            progress(row)
        return row

    first = look(0)
    if not first.fits:
        if first.analysis is None:
            raise DoesNotFitError("memory ran out while the smallest microbatch was compiled.")
        raise DoesNotFitError(_advice.why_not(first.analysis, limit))
    assert first.analysis is not None
    fixed = first.analysis.peak - first.analysis.part(ACTIVATIONS)
    fits, too_large, turns = 0, len(sizes), 0
    while too_large - fits > 1:
        # Memory bends here and there: the nearest points on both sides tell most.
        nearest = sorted(known)[-2:] if too_large == len(sizes) else (sizes[fits], sizes[too_large])
        line = _line({m: known[m] for m in nearest}, fixed)
        guess = max(i for i in range(fits, too_large) if i == fits or line(sizes[i]) <= limit)
        if turns >= 2:
            # A line that misleads would move one candidate at a time; halving bounds that.
            guess = (fits + too_large) // 2
        guess = min(max(guess, fits + 1), too_large - 1)
        if look(guess).fits:
            fits = guess
        else:
            too_large = guess
        turns += 1
    line = _line(known, fixed)
    predicted = {m: _predicted_row(plan, m, line, sizes[fits]) for m in sizes}
    rows = tuple({**predicted, **known}.values())
    best = known[sizes[fits]]
    assert best.analysis is not None
    notes = [*_few_divisors(plan, sizes), *_advice.advise(best.analysis)]
    return Search(best.plan, rows, limit, line, tuple(notes))


def divisors(n: int) -> list[int]:
    """All divisors of n, growing.

    Example:
      >>> divisors(12)
      [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _compiled_row(make: Make, plan: BatchPlan, limit: int, folder: Path | None) -> Row:
    made = make(plan)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], tuple):
        raise TypeError(
            f"make must return (step, args), a jitted step and a tuple of what it is called with; "
            f"got {type(made).__name__}."
        )
    program = lower(made[0], *made[1])
    key = "" if folder is None else _cache.key_of(program.lowered)
    analysis = None if folder is None else _cache.load(folder, key)
    how = "compiled" if analysis is None else "cached"
    if analysis is None:
        try:
            analysis = compile_and_read(program)
        except Exception as error:
            if not is_exhausted(error):
                raise
            return Row(plan, None, False, how, None)
        if folder is not None:
            _cache.store(folder, key, analysis)
    return Row(plan, analysis.peak, analysis.peak <= limit, how, analysis)


def _predicted_row(plan: BatchPlan, m: int, line: Line, largest: int) -> Row:
    # Beyond its neighbour nothing was compiled: larger ones are taken not to fit.
    return Row(plan.with_microbatch_size(m), line(m), m <= largest, "predicted", None)


def _line(known: dict[int, Row], fixed: int) -> Line:
    peaks = {m: row.peak for m, row in known.items() if row.peak is not None}
    # With A = 1 there is neither a loop nor an accumulator: another program, off the line.
    looped = {m: peak for m, peak in peaks.items() if known[m].plan.microbatches > 1}
    return fit(looped if len(looped) > 1 else peaks, fixed)


def _few_divisors(plan: BatchPlan, sizes: list[int]) -> list[str]:
    n = plan.examples_per_replica
    if len(sizes) > 2 or n < 4:
        return []
    near = [k for k in (n - 1, n + 1) if len(divisors(k)) > 2]
    offers = "; ".join(f"{k} would offer {', '.join(map(str, divisors(k)))}" for k in near)
    return [f"{n} examples per replica is a prime: m can be 1 or {n} alone ({offers})"]

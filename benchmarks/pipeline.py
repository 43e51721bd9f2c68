"""What do the data side, the ledger and logging add to a training step?

First a step that is a wait of 5 ms, as the host sees an accelerator at work: what `groups` and
`prefetch` add to it, per group of text: IDs checked, padded to a length, cut into microbatches,
weighed, put on the device. Then the example trainer end to end, against its own compiled step
called on the same groups when they are all there.
"""

from __future__ import annotations

import importlib.util
import io
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_accum as ja
from benchmarks._machine import Limits
from benchmarks._result import Claim, Figure, Result, Table
from benchmarks._timing import decided, interleaved, milliseconds, quartiles, ratio

STEP = 5e-3
ALONE = "the step alone"
PREFETCHED = "groups, prefetched"
LIMIT = 1.02
BARE = "its compiled step alone"
TRAINED = "the trainer"
WARM = 3  # updates of the trainer before it is timed: the first ones compile
TRAINER = Path(__file__).parents[1] / "examples" / "train_gpt.py"
KINDS: dict[str, dict[str, Any]] = {
    "batches of text": {},
    "single examples, padded": {"batched": False, "lengths": [32, 64]},
}


def stream(kind: str, examples: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Text of up to 64 tokens: batches of 32, or single examples."""
    tokens = rng.integers(0, 256, (examples, 64), dtype=np.int32)
    lengths = rng.integers(2, 65, examples)
    names = [f"document {i}#0" for i in range(examples)]
    if kind == "batches of text":
        mask = np.arange(64) < lengths[:, None]
        starts = range(0, examples, 32)
        return [
            {"tokens": tokens[i : i + 32], "mask": mask[i : i + 32], "id": names[i : i + 32]}
            for i in starts
        ]
    return [{"tokens": tokens[i, :n], "id": names[i]} for i, n in enumerate(lengths)]


def ways(kind: str, plan: ja.BatchPlan, groups: int) -> dict[str, Callable[[], None]]:
    """The step alone, and behind the data side with and without prefetching."""
    data = stream(kind, groups * plan.examples_per_update, np.random.default_rng(0))

    def made() -> Iterator[ja.Group]:
        return ja.groups(data, plan, ids="id", weight=ja.next_token_targets, **KINDS[kind])

    def alone() -> None:
        for _ in range(groups):
            time.sleep(STEP)

    def behind(source: Callable[[], Iterator[ja.Group]]) -> Callable[[], None]:
        def run() -> None:
            n = 0
            for _ in source():
                time.sleep(STEP)
                n += 1
            assert n == groups

        return run

    return {
        ALONE: alone,
        "groups": behind(made),
        PREFETCHED: behind(lambda: ja.prefetch(made())),
    }


def processor_time(kind: str, plan: ja.BatchPlan, groups: int, rounds: int) -> list[float]:
    """Seconds of processor per group, whatever else the machine does meanwhile."""
    data = stream(kind, groups * plan.examples_per_update, np.random.default_rng(0))
    seconds = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in ja.groups(data, plan, ids="id", weight=ja.next_token_targets, **KINDS[kind]):
            pass
        seconds.append((time.thread_time() - begin) / groups)
    return seconds


class Stopwatch:
    """Stands in for `make_train_step` in the trainer: on what its step was called, and when.

    Calls run ahead of what is computed, so that the clock starts and ends when all is.
    """

    def __init__(self) -> None:
        self.made = ja.make_train_step
        self.began = 0.0
        self.step: Any = None
        self.start: Any = None
        self.groups: list[Any] = []

    def make(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The step of `make_train_step`, watched."""
        self.step, self.groups = self.made(*args, **kwargs), []

        def watched(params: Any, state: Any, batch: Any, **told: Any) -> Any:
            if not self.groups:  # the step donates them
                self.start = jax.tree.map(jnp.copy, (params, state))
            if len(self.groups) == WARM:
                jax.block_until_ready((params, state))
                self.began = time.perf_counter()
            self.groups.append((batch, told))
            return self.step(params, state, batch, **told)

        return watched

    def trained(self) -> float:
        """Seconds per update until now, when the trainer has ended and read its last loss."""
        return (time.perf_counter() - self.began) / (len(self.groups) - WARM)

    def bare(self) -> float:
        """Seconds per update of the step alone: the same updates, on groups that are there."""
        params, state = self.start
        begin = 0.0
        for i, (batch, told) in enumerate(self.groups):
            if i == WARM:
                jax.block_until_ready((params, state))
                begin = time.perf_counter()
            params, state, _ = self.step(params, state, batch, **told)
        jax.block_until_ready((params, state))
        return (time.perf_counter() - begin) / (len(self.groups) - WARM)


def trainer(result: Result, examples: int, rounds: int, options: list[str]) -> None:
    """`examples/train_gpt.py` end to end, in turn with its own step."""
    import runpy

    main = runpy.run_path(str(TRAINER))["main"]
    watch = Stopwatch()
    seconds: dict[str, list[float]] = {BARE: [], TRAINED: []}
    on_term = signal.getsignal(signal.SIGTERM)  # which the trainer takes over
    ja.make_train_step = watch.make  # type: ignore[assignment]
    try:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
                main(["--folder", folder, "--examples", str(examples), "--quiet", *options])
            seconds[TRAINED].append(watch.trained())
            seconds[BARE].append(watch.bare())
    finally:
        ja.make_train_step = watch.made
        signal.signal(signal.SIGTERM, on_term)
    over = ratio("trainer/over its step", seconds, TRAINED, BARE)
    rows = [
        [way, milliseconds(f"trainer/{way}/ms", seconds[way]), share]
        for way, share in ((BARE, ""), (TRAINED, over))
    ]
    result.add(over, *[row[1] for row in rows])
    result.tables.append(
        Table(
            "The example trainer, per update",
            ["way", "ms", "over the step alone"],
            rows,
            f"{examples} examples, {len(watch.groups)} updates, options: {' '.join(options)}. The "
            "trainer reads text, checks IDs, logs, counts, audits and saves checkpoints on the "
            "processor that also does the arithmetic; with an accelerator it does so meanwhile. "
            f"Both from update {WARM + 1} until the last has been computed.",
        )
    )


def lost(kind: str, plan: ja.BatchPlan, groups: int) -> int:
    """Examples of a stream with a short end that are in no group: there must be none."""
    data = stream(kind, groups * plan.examples_per_update + 5, np.random.default_rng(0))
    made = ja.groups(data, plan, ids="id", weight=ja.next_token_targets, **KINDS[kind])
    names = {name for group in ja.prefetch(made) for name in group.ids}
    return groups * plan.examples_per_update + 5 - len(names)


def run(*, quick: bool = False, full: bool = False, limits: Limits | None = None) -> Result:
    """The benchmark."""
    del limits  # what bounds it is the step alone
    groups, rounds = (10, 2) if quick else (100, 16 if full else 8)
    plan = ja.BatchPlan(microbatch_size=4, microbatches=4, replicas=2)
    result = Result("pipeline", __doc__ or "")
    result.configuration = {
        "step": f"{1e3 * STEP:g} ms",
        "examples per update": plan.examples_per_update,
        "tokens in a row": 64,
        "groups": groups,
        "rounds": rounds,
    }
    rows: list[list[Any]] = []
    for kind in KINDS:
        timed = ways(kind, plan, groups)
        seconds = interleaved(timed, rounds=rounds)
        pair = {way: timed[way] for way in (PREFETCHED, ALONE)}
        claimed = decided(pair, LIMIT, most=4 * rounds, seconds=seconds)
        for name, values in seconds.items():
            each = result.add(milliseconds(f"{kind}/{name}/ms", [s / groups for s in values]))
            of = claimed if name in claimed else seconds
            share = result.add(ratio(f"{kind}/{name}", of, name, ALONE))
            rows.append([kind, name, each, share])
        busy = quartiles([s / STEP for s in processor_time(kind, plan, groups, rounds)])
        low, middle, high = busy
        share = result.add(Figure(f"{kind}/processor", middle, low, high))
        each = Figure("", *(1e3 * STEP * x for x in (middle, low, high)), unit="ms")
        rows.append([kind, "groups alone, processor time", each, share])
        result.claims.append(
            Claim(
                f"the data side adds under 2% to a step of 5 ms ({kind})",
                f"{kind}/{PREFETCHED}",
                LIMIT,
            )
        )
        result.exact(f"{kind}/examples lost", lost(kind, plan, groups), "examples")
        result.claims.append(Claim(f"no example is lost ({kind})", f"{kind}/examples lost", 0))
    result.tables.append(
        Table("Time per group", ["stream", "way", "ms", "over the step alone"], rows)
    )
    if all(importlib.util.find_spec(name) for name in ("flax", "rich", "orbax")):
        small = ["--layers", "1", "--width", "8"]
        large = ["--layers", "4", "--width", "128", "--microbatch-size", "8"]
        trainer(result, *((160, 1, small) if quick else (960, 3, large)))
    return result

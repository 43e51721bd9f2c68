"""What does the data side add to a training step?

    python -m benchmarks.pipeline

The step is a wait of 5 ms, as the host sees an accelerator at work; what is measured is what
`groups` and `prefetch` add to it, per group of text: IDs checked, padded to a length, cut
into microbatches, weighed, put on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jax_accum as ja
from benchmarks._result import Claim, Figure, Result, Table
from benchmarks._timing import interleaved, milliseconds, quartiles, ratio

STEP = 5e-3
ALONE = "the step alone"
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
        "groups, prefetched": behind(lambda: ja.prefetch(made())),
    }


def processor_time(kind: str, plan: ja.BatchPlan, groups: int, rounds: int) -> list[float]:
    """Seconds of processor per group: unlike time, hardly moved by what else the machine does."""
    data = stream(kind, groups * plan.examples_per_update, np.random.default_rng(0))
    seconds = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in ja.groups(data, plan, ids="id", weight=ja.next_token_targets, **KINDS[kind]):
            pass
        seconds.append((time.thread_time() - begin) / groups)
    return seconds


def run(*, quick: bool = False, full: bool = False) -> Result:
    """The benchmark."""
    groups, rounds = (10, 2) if quick else (100, 15 if full else 7)
    plan = ja.BatchPlan(microbatch_size=4, microbatches=4, replicas=2)
    result = Result("pipeline", (__doc__ or "").split("\n")[0])
    result.configuration = {
        "step": f"{1e3 * STEP:g} ms",
        "examples per update": plan.examples_per_update,
        "tokens in a row": 64,
        "groups": groups,
        "rounds": rounds,
    }
    rows: list[list[Any]] = []
    for kind in KINDS:
        seconds = interleaved(ways(kind, plan, groups), rounds=rounds)
        for name, values in seconds.items():
            each = result.add(milliseconds(f"{kind}/{name}/ms", [s / groups for s in values]))
            share = result.add(ratio(f"{kind}/{name}", seconds, name, ALONE))
            rows.append([kind, name, each, share])
        busy = quartiles([s / STEP for s in processor_time(kind, plan, groups, rounds)])
        low, middle, high = busy
        share = result.add(Figure(f"{kind}/processor", middle, low, high))
        each = Figure("", *(1e3 * STEP * x for x in (middle, low, high)), unit="ms")
        rows.append([kind, "groups alone, processor time", each, share])
        result.claims.append(
            Claim(
                f"the data side adds under 2% to a step of 5 ms ({kind})",
                f"{kind}/groups, prefetched",
                1.02,
            )
        )
    result.claims.append(
        Claim(
            "the data side takes under 2% of the processor in a step of 5 ms (batches of text)",
            "batches of text/processor",
            0.02,
        )
    )
    result.tables.append(
        Table("Time per group", ["stream", "way", "ms", "over the step alone"], rows)
    )
    return result


def main() -> None:
    """Prints the table and the claims."""
    result = run()
    for table in result.tables:
        for row in [table.columns, *table.rows]:
            print("  ".join(f"{cell!s:<26}" for cell in row))
    for claim, figure, holds in result.verdicts():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {claim.text}: {figure}")


if __name__ == "__main__":
    main()

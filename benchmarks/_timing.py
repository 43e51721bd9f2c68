"""Timing that stands noise: the ways take turns, and what counts is their ratio in a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from benchmarks._result import Figure


def interleaved(
    ways: Mapping[str, Callable[[], None]], *, rounds: int, calls: int = 1, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds per call of each way, one number a round.

    Args:
      ways: functions that return when their work is done.
      rounds: in each, every way is timed once, in turn; the order is reversed in every
        other round, so that a drift of the machine favours nobody.
      calls: calls timed together.
      warm_up: calls before the first round.
    """
    for run in ways.values():
        for _ in range(warm_up):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        for name in list(ways) if i % 2 == 0 else list(reversed(ways)):
            start = time.perf_counter()
            for _ in range(calls):
                ways[name]()
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(key: str, seconds: dict[str, list[float]], name: str, base: str) -> Figure:
    """The time of `name` over that of `base` in the same round."""
    low, middle, high = quartiles(
        [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    )
    return Figure(key, middle, low, high)


def milliseconds(key: str, seconds: list[float]) -> Figure:
    """The time of a call."""
    low, middle, high = quartiles([1e3 * s for s in seconds])
    return Figure(key, middle, low, high, "ms")

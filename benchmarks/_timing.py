"""Timing that stands noise: the ways take turns, and what counts is their ratio in a round."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

from benchmarks._result import Figure

SURE = 0.99
"""Of the interval of a median, where a claim is held against it."""
MORE = 4
"""Rounds that are added at a time: an even number, so that both orders are as frequent."""


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


def decided(
    ways: Mapping[str, Callable[[], None]],
    limit: float,
    *,
    most: int,
    calls: int = 1,
    seconds: Mapping[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """Two ways in turn, for as many rounds as their ratio needs to be told from a limit.

    A few rounds of a ratio near its limit fall on one side in one run and on the other in the
    next. So rounds are added until the limit lies outside the interval of the median ratio, on
    either side. (Looked at again and again, it errs a little more often than `SURE` says.)

    Args:
      ways: the way that a claim is on, then the one that it is compared with.
      limit: of the claim.
      most: rounds after which it stays undecided.
      calls: as `interleaved` takes it.
      seconds: of rounds that there are, where both took their turn.
    """
    name, base = ways
    found = {way: list(seconds[way]) if seconds else [] for way in ways}
    while len(found[base]) < most:
        low, high = interval(ratios(found, name, base))
        if not low <= limit <= high:
            break
        more = interleaved(ways, rounds=MORE, calls=calls, warm_up=0 if found[base] else 1)
        for way in ways:
            found[way] += more[way]
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Where the median of what `values` are drawn from lies, `SURE`: from no distribution at all.

    Of `n` values a `B(n, 1/2)` number lies below the true median, so that it is between the
    `k`-th and the `k`-th last value unless that number is less than `k` or more than `n - k`.
    Without bounds where there are too few values.
    """
    n, k, outside = len(values), 0, 0.0
    while k <= n:
        outside += 2 * math.comb(n, k) / 2**n
        if outside > 1 - SURE:
            break
        k += 1
    if k == 0:
        return -math.inf, math.inf
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(seconds: Mapping[str, list[float]], name: str, base: str) -> list[float]:
    """The time of `name` over that of `base`, round by round."""
    return [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]


def ratio(key: str, seconds: dict[str, list[float]], name: str, base: str) -> Figure:
    """The time of `name` over that of `base` in the same round."""
    values = ratios(seconds, name, base)
    low, middle, high = quartiles(values)
    bounds = [x if math.isfinite(x) else None for x in interval(values)]
    return Figure(key, middle, low, high, median_low=bounds[0], median_high=bounds[1])


def milliseconds(key: str, seconds: list[float]) -> Figure:
    """The time of a call."""
    low, middle, high = quartiles([1e3 * s for s in seconds])
    return Figure(key, middle, low, high, "ms")

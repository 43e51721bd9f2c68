"""Two runs side by side: what got slower beyond the noise, and which exact figures changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._result import Figure

UNLESS_CLAIMED = 4 / 3
"""By how much a ratio that no claim rests on must be worse: it has few rounds."""


class Run(NamedTuple):
    """The figures of a run by benchmark and key, and the keys that claims rest on.

    And of each benchmark its configuration, but for the rounds.
    """

    figures: dict[str, Figure]
    claimed: set[str]
    configurations: dict[str, dict[str, Any]]


def load(path: Path) -> Run:
    """What a `results.json` holds.

    Raises:
      ValueError: not a file of this kind.
    """
    try:
        data: Any = json.loads(path.read_text())
        figures, claimed, configurations = {}, set(), {}
        for result in data["results"]:
            configuration = {k: v for k, v in result["configuration"].items() if k != "rounds"}
            configurations[result["name"]] = configuration
            for figure in result["figures"]:
                figures[f"{result['name']}/{figure['key']}"] = Figure(**figure)
            for claim in result["claims"]:
                key = f"{result['name']}/{claim['key']}"
                claimed.add(key)
                if not claim["at_most"]:  # "at least": less of it is worse
                    figures[key] = dataclasses.replace(figures[key], better="higher")
        return Run(figures, claimed, configurations)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a results.json of the benchmarks: {error}") from error


def incomparable(old: Run, new: Run) -> dict[str, str]:
    """What differs, by benchmark, where two runs have measured different things."""
    found = {}
    for name in old.configurations.keys() & new.configurations.keys():
        a, b = old.configurations[name], new.configurations[name]
        keys = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
        if keys:
            parts = [f"{k}: {a.get(k)} before, {b.get(k)} now" for k in keys]
            found[name] = "; ".join(parts)
    return found


def compare(old: Run, new: Run) -> list[str]:
    """A line for each figure that is worse: measured ones beyond twice the range of quartiles.

    Milliseconds and rates belong to the machine; only ratios, and what is exact, are held
    against each other. What a claim rests on was measured with rounds enough for that; of other
    ratios the quartiles of two runs of the same code lie apart at times.
    """
    lines = []
    other = incomparable(old, new)
    for key in sorted(old.figures.keys() & new.figures.keys()):
        a, b = old.figures[key], new.figures[key]
        if key.split("/")[0] in other:
            continue
        if a.unit in ("ms", "tokens/s", "MiB", "of the limit"):
            continue
        sign = 1 if a.better == "lower" else -1
        if a.exact:
            worse = sign * (b.value - a.value) > 1e-9 * abs(a.value)
        else:
            factor = 1.0 if key in old.claimed & new.claimed else UNLESS_CLAIMED
            small, large = (a, b) if a.better == "lower" else (b, a)  # if it is worse
            gap = large.low - small.high
            beyond = gap > (large.high - large.low + small.high - small.low) / 2
            worse = beyond and large.value > factor * small.value
        if worse:
            lines.append(f"{key}: {a} before, {b} now")
    return lines

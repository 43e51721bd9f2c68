"""Two runs side by side: what got slower beyond the noise, and which exact figures changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks._result import Figure


def load(path: Path) -> dict[str, Figure]:
    """The figures of a `results.json`, by benchmark and key.

    Raises:
      ValueError: not a file of this kind.
    """
    try:
        data: Any = json.loads(path.read_text())
        return {
            f"{result['name']}/{figure['key']}": Figure(**figure)
            for result in data["results"]
            for figure in result["figures"]
        }
    except (OSError, UnicodeDecodeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a results.json of the benchmarks: {error}") from error


def compare(old: dict[str, Figure], new: dict[str, Figure]) -> list[str]:
    """A line for each figure that is worse: measured ones where the quartiles do not overlap.

    Milliseconds and rates belong to the machine; only ratios, and what is exact, are held
    against each other.
    """
    lines = []
    for key in sorted(old.keys() & new.keys()):
        a, b = old[key], new[key]
        if a.unit in ("ms", "tokens/s", "MiB"):
            continue
        sign = 1 if a.better == "lower" else -1
        if a.exact:
            worse = sign * (b.value - a.value) > 1e-9 * abs(a.value)
        else:
            worse = sign * b.value > sign * a.value and (
                b.low > a.high if a.better == "lower" else b.high < a.low
            )
        if worse:
            lines.append(f"{key}: {a} before, {b} now")
    return lines

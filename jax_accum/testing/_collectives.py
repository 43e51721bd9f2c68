"""What a compiled program communicates: its collectives, and which of them stand in loops."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}


class Collective(NamedTuple):
    """One collective operation of a compiled program.

    Attributes:
      kind: one of `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`,
        `"collective-permute"`.
      in_loop: whether it is executed in every iteration of a loop.
      shapes: of its results on one device, `(dtype as XLA writes it, shape)` each.
      bytes: of its results on one device.
    """

    kind: str
    in_loop: bool
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    bytes: int


def count_collectives(compiled: Any) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text.

    Every one is listed once, however often its loop runs.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, or the text of its HLO.

    Raises:
      TypeError: neither of these.

    Example:
      >>> text = '''
      ... body (p: f32[8]) -> f32[8] {
      ...   ROOT r = f32[8]{0} all-reduce(f32[8]{0} p), to_apply=add
      ... }
      ... ENTRY main (x: f32[8]) -> f32[8] {
      ...   ROOT w = f32[8]{0} while(f32[8]{0} x), condition=cond, body=body
      ... }
      ... '''
      >>> count_collectives(text)
      [Collective(kind='all-reduce', in_loop=True, shapes=(('f32', (8,)),), bytes=32)]
    """
    text = compiled if isinstance(compiled, str) else getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str):
        raise TypeError(
            "compiled must be a compiled program, jax.jit(f).lower(...).compile(), or its text; "
            f"got {type(compiled).__name__}."
        )
    parts = computations(text)
    looped = _reached_from_loops(parts)
    found = []
    for name, lines in parts.items():
        for line in lines:
            match = re.search(rf"= (.+?) ({'|'.join(KINDS)})(-start)?\(", line)
            if not match:
                continue
            shapes = _shapes(match.group(1))
            if match.group(3) and len(shapes) > 1:  # operands and results, in halves
                shapes = shapes[len(shapes) // 2 :]
            size = sum(_itemsize(dtype) * math.prod(shape) for dtype, shape in shapes)
            found.append(Collective(match.group(2), name in looped, tuple(shapes), size))
    return found


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation, by its name."""
    parts: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        opens = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if opens and not line.startswith(" "):
            name = opens.group(1)
            parts[name] = []
        elif name:
            parts[name].append(line)
    return parts


def _reached_from_loops(computations: dict[str, list[str]]) -> set[str]:
    """Names of the computations that a loop executes, itself or by a call or branch."""
    mentions = {
        name: {
            word
            for line in lines
            for word in re.findall(r"[\w.\-]+", line.partition("), ")[2])
            if word in computations
        }
        for name, lines in computations.items()
    }
    reached: set[str] = set()
    todo = [
        found
        for lines in computations.values()
        for line in lines
        for found in re.findall(r"(?:body|condition)=%?([\w.\-]+)", line)
    ]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo.extend(mentions.get(name, ()))
    return reached


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in re.findall(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", text)
    ]


def _itemsize(dtype: str) -> int:
    digits = re.sub(r"\D.*", "", dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) or "8"
    return _BYTES.get(dtype, max(int(digits) // 8, 1))

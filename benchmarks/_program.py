"""What a compiled program needs, in parameter trees: exact, and the same in every run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_accum.testing._collectives import computations

Tree = Any
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
    "while", "conditional", "call",
}  # fmt: skip
"""Operations that move nothing, or stand for the program that they call."""


class Program(NamedTuple):
    """Memory of a compiled program on one device.

    Attributes:
      temporary: beside arguments and results, in trees of parameters.
      peak: arguments and results, those in one buffer counted once, and temporary; in trees.
      large_copies: copies of at least the size of the smallest parameter matrix.
      operations: of at least that size, in the text: those of a loop count once.
    """

    temporary: float
    peak: float
    large_copies: int
    operations: int


def compiled_together(
    ways: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]],
) -> dict[str, Any]:
    """The program of each `(function, arguments)`; the first two arguments are donated.

    Two at a time: XLA compiles without Python's lock, and for most of it on one core.
    """

    def one(way: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        call, arguments = way
        return jax.jit(call, donate_argnums=(0, 1)).lower(*arguments).compile()

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ways, pool.map(one, ways.values()), strict=True))


def inspect(compiled: Any, params: Tree) -> Program:
    """Reads a compiled program; `params` gives the unit of memory."""
    memory = compiled.memory_analysis()
    unit = sum(x.nbytes for x in jax.tree.leaves(params))
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    smallest = min((x.size for x in jax.tree.leaves(params) if jnp.ndim(x) > 1), default=2)
    return Program(
        temporary=memory.temp_size_in_bytes / unit,
        peak=peak / unit,
        large_copies=sum(n >= smallest for n in copied_sizes(compiled.as_text())),
        operations=sum(n >= smallest for n in operation_sizes(compiled.as_text())),
    )


def copied_sizes(text: str) -> list[int]:
    """Entries that each copy operation of a program text copies."""
    return [
        _entries(result) for result in re.findall(r"= (\w+\[[\d,]*\])(?:\{[^}]*\})? copy\(", text)
    ]


def operation_sizes(text: str) -> list[int]:
    """Entries that each operation of a program text writes; a fusion is one operation."""
    fused = set(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", text))
    found = [
        re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][\w\-]*)\(", line)
        for name, lines in computations(text).items()
        if name not in fused
        for line in lines
    ]
    return [_entries(match.group(1)) for match in found if match and match.group(2) not in FREE]


def _entries(shapes: str) -> int:
    """Of all arrays that a text such as `(f32[2,3]{1,0}, s32[])` names."""
    return sum(
        math.prod(int(n) for n in dims.split(",") if n)
        for dims in re.findall(r"\[([\d,]*)\]", shapes)
    )

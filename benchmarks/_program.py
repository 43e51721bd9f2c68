"""What a compiled program needs, in parameter trees: exact, and the same in every run."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


class Program(NamedTuple):
    """Memory of a compiled program on one device.

    Attributes:
      temporary: beside arguments and results, in trees of parameters.
      peak: arguments and results, those in one buffer counted once, and temporary; in trees.
      large_copies: copies of at least the size of the smallest parameter matrix.
    """

    temporary: float
    peak: float
    large_copies: int


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
    )


def copied_sizes(text: str) -> list[int]:
    """Entries that each copy operation of a program text copies."""
    sizes = []
    for dims in re.findall(r"= \w+\[([\d,]*)\](?:\{[^}]*\})? copy\(", text):
        size = 1
        for n in filter(None, dims.split(",")):
            size *= int(n)
        sizes.append(size)
    return sizes

"""How far apart two gradients are, and how far rounding alone lets them be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_accum.testing._names import Arrays

FACTOR = 4.0
"""An accumulated gradient adds the same numbers in another order. Its error is of the size of
the undivided one's; four times leaves room for chance, and for no mistake."""

FLOOR_ULPS = 4.0
"""What always passes, in units of the last place: the undivided gradient can be exact by luck."""

FLOAT64_AGREEMENT = 1e-12
"""Two float64 gradients: nothing more exact is at hand to tell which of them is right. It is
thousands of roundings of float64, and a millionth of one rounding of float32."""

SMALL_PARAMETER = 2.0**-10
"""A parameter whose gradient is less than this share of the tree's holds little but the rounding
of larger numbers (the bias of attention keys, whose gradient is 0 in exact arithmetic): it is
measured against this share of the tree's norm."""

FEW = 16
"""With fewer entries an error can be small by luck: of two errors of the same kind in one entry,
one is over four times the other in about three cases of ten, in 16 entries hardly ever."""


@dataclass(frozen=True)
class Distances:
    """Relative L2 distances: over the tree, and by parameter (see `SMALL_PARAMETER`)."""

    tree: float
    parameters: dict[str, float]


def unit_roundoff(trees: Iterable[Arrays], computed_in: DTypeLike | None) -> float:
    """Half a unit in the last place of the coarsest type of floating point that is there.

    >>> unit_roundoff([{"a": np.ones(2, np.float32), "b": np.ones(2)}], None) == 2.0**-24
    True
    """
    found = {array.dtype for tree in trees for array in tree.values()}
    if computed_in is not None:
        found.add(jnp.dtype(computed_in))
    inexact = [dtype for dtype in found if jnp.issubdtype(dtype, np.inexact)]
    return max((float(jnp.finfo(dtype).eps) / 2 for dtype in inexact), default=2.0**-53)


def bound_from_sizes(u: float, tree: Arrays, summands: int) -> float:
    """The relative error that rounding leaves in a gradient, from the lengths of its sums alone.

    A sum of n numbers with roundings at random is off by about u √n (Higham and Mary, "A new
    approach to probabilistic rounding error analysis", 2019). Behind an entry stand one sum for
    each parameter, no longer than its longest axis, and the one over the batch. It knows nothing
    of cancellation: that takes a reference.
    """
    lengths = sum(max(array.shape, default=1) for array in tree.values())
    return FACTOR * u * math.sqrt(lengths + summands)


def distances(got: Arrays, want: Arrays) -> Distances:
    """Relative L2 distances of `got` from `want`, summed in float64.

    >>> distances({"a": np.array([3.0, 4.5])}, {"a": np.array([3.0, 4.0])})
    Distances(tree=0.1, parameters={'a': 0.1})
    """
    apart = {name: norm(_wide(got[name]) - _wide(want[name])) for name in want}
    size = {name: norm(want[name]) for name in want}
    whole = math.hypot(*size.values())
    floor = SMALL_PARAMETER * whole
    return Distances(
        _relative(math.hypot(*apart.values()), whole),
        {name: _relative(apart[name], max(size[name], floor)) for name in want},
    )


def norm(array: np.ndarray) -> float:
    """L2 norm, summed in float64."""
    return float(np.linalg.norm(_wide(array).ravel()))


def inner(a: np.ndarray, b: np.ndarray) -> float:
    """Real part of the inner product, summed in float64."""
    return float(np.vdot(_wide(a), _wide(b)).real)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _relative(error: float, size: float) -> float:
    return error / size if size else (0.0 if error == 0 else math.inf)

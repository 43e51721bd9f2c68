"""Whether two gradients are the same but for rounding, judged against a float64 one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from jax_accum.testing._message import Clues, Side, explain, non_finite
from jax_accum.testing._names import Arrays, named_arrays, shown
from jax_accum.testing._rule import (
    FACTOR,
    FEW,
    FLOAT64_AGREEMENT,
    FLOOR_ULPS,
    Distances,
    bound_from_sizes,
    distances,
    unit_roundoff,
)

FLOAT64_ROUNDOFF = 2.0**-53


def assert_same_gradient(
    got: Any,
    want: Any,
    reference: Any = None,
    *,
    undivided: Any = None,
    want_undivided: Any = None,
    computed_in: DTypeLike | None = None,
    summands: int = 0,
    microbatches: int | None = None,
    replicas: int | None = None,
    weights: ArrayLike = (),
    factors: Mapping[str, float] | None = None,
) -> None:
    """Asserts that two gradients of the same examples are the same but for rounding.

    With a `reference`, the gradient of the undivided batch in float64, each gradient may be four
    times as far from it as the undivided gradient of its own framework and precision is: an
    accumulated gradient adds the same numbers in another order. Four units in the last place
    always pass. The distance is relative L2, over the tree and by parameter; of a parameter
    whose gradient is less than 2^-10 of the tree's, relative to that share of the tree.

    Without one, the two may be 4 u √n apart, where u is half a unit in the last place of the
    coarser type, and n the longest axes of all parameters added up, plus `summands`. Rounding
    errors at random grow so; cancellation, which no size tells of, can make them larger.

    Two float64 gradients may be 1e-12 apart, or 4 u √n where that is more.

    Args:
      got: the accumulated gradient; a pytree, or NumPy arrays by name, where `/` parts a path. Of
        an NNX state give `nnx.to_pure_dict(state)`, whose names lack the `/value`.
      want: what it should be: the undivided gradient, or that of another framework, of the same
        names and shapes.
      reference: the undivided gradient in float64 (complex128 where complex).
      undivided: the undivided gradient in `got`'s framework and precision. Without it, `want` is
        taken for that.
      want_undivided: the same for `want`, where `want` is itself an accumulated gradient.
      computed_in: the type that the model computes in, where it is coarser than the arrays'
        (bfloat16 activations beside float32 gradients).
      summands: examples or tokens that the gradient is a sum over; lets it be further off where
        no undivided gradient tells.
      microbatches: A, if known. This and the rest are numbers that a mistake might have divided
        or multiplied by, for the message alone.
      replicas: D.
      weights: of every microbatch, such as their supervised tokens; any shape.
      factors: further numbers by name, such as `{"loss scale": 1024}`.

    Raises:
      AssertionError: they are not the same, or not finite, or an undivided gradient has lost half
        its digits against the `reference`, so that it measures nothing. The message lists the
        worst parameters, their error beside the rounding of the framework itself, and where one
        gradient is the other times a constant, what usually causes that.
      TypeError: a leaf is no array of numbers.
      ValueError: a `reference` that is not float64 or not finite, an undivided gradient without
        a `reference`, or either of other names or shapes than `want`.

    Example:
      >>> exact = {"head": np.array([1 / 3, 2 / 3])}
      >>> want = {"head": np.float32([1 / 3, 2 / 3])}
      >>> assert_same_gradient({"head": np.float32([1 / 3, 2 / 3])}, want, exact)
      >>> assert_same_gradient({"head": 4 * want["head"]}, want, exact, microbatches=4)
      Traceback (most recent call last):
      AssertionError: got is not the same gradient: it is off by 3 (relative L2, from the float64
      reference), and rounding explains 4.77e-07.
        got is 4 times the float64 reference in every parameter.
        Likely cause: not divided by the number of microbatches (A = 4).
        worst parameters  relative error  allowed   over own rounding
        head              3               4.77e-07  5e+07
    """
    clues = Clues(microbatches, replicas, tuple(np.ravel(weights).tolist()), dict(factors or {}))
    _check(summands, clues)
    trees = {"got": named_arrays(got, "got"), "want": named_arrays(want, "want")}
    _same_names(trees["got"], trees["want"], "got", AssertionError)
    for name, tree in (("undivided", undivided), ("want_undivided", want_undivided)):
        if tree is not None:
            trees[name] = named_arrays(tree, name)
            _same_names(trees[name], trees["want"], name, ValueError)
    if reference is None and len(trees) > 2:
        raise ValueError(
            "undivided gradients are measured against a reference, and none is given: give the "
            "float64 gradient of the undivided batch as reference."
        )
    exact = None if reference is None else _reference(reference, trees["want"])
    if found := non_finite(trees):
        raise AssertionError(found)
    u = {name: unit_roundoff([tree], computed_in) for name, tree in trees.items()}
    if exact is None:
        coarse = max(u.values())
        allowed = _uniform(_bound(coarse, trees["want"], summands), trees["want"])
        sides = [Side("got", "want", trees["got"], trees["want"], allowed, None, coarse)]
    else:
        yardsticks = {
            "got": next(n for n in ("undivided", "want_undivided", "want") if n in trees),
            "want": "want_undivided",
        }
        sides = []
        for name, tree in trees.items():
            bound = _bound(u[name], exact, summands)
            own = None
            yardstick = yardsticks.get(name)
            if u[name] <= FLOAT64_ROUNDOFF:
                allowed = _uniform(bound, exact)
            elif yardstick not in trees:
                allowed = _uniform(math.sqrt(u[name]), exact)
            elif u[yardstick] < u[name]:  # the rounding of a finer type says nothing of this one
                allowed = _uniform(bound, exact)
            else:
                own = distances(trees[yardstick], exact)
                allowed = _allowed(own, u[name], bound, exact)
            sides.append(Side(name, "the float64 reference", tree, exact, allowed, own, u[name]))
    if failed := [side for side in sides if not side.passed]:
        raise AssertionError("\n".join(explain(side, clues) for side in failed))


def _check(summands: int, clues: Clues) -> None:
    for name, value, least in (
        ("summands", summands, 0),
        ("microbatches", clues.microbatches, 1),
        ("replicas", clues.replicas, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}, and must be at least {least}: it is a number.")
    if bad := [weight for weight in clues.weights if not 0 <= weight < math.inf]:
        raise ValueError(f"weights hold {bad[0]}: give what each microbatch was weighted by.")
    for name, factor in clues.factors.items():
        if not math.isfinite(factor) or factor == 0:
            raise ValueError(f"factors hold {factor} for {name!r}: give finite numbers but 0.")


def _bound(u: float, tree: Arrays, summands: int) -> float:
    bound = bound_from_sizes(u, tree, summands)
    return max(bound, FLOAT64_AGREEMENT) if u <= FLOAT64_ROUNDOFF else bound


def _uniform(bound: float, tree: Arrays) -> Distances:
    return Distances(bound, dict.fromkeys(tree, bound))


def _allowed(own: Distances, u: float, bound: float, exact: Arrays) -> Distances:
    """What a framework's own undivided gradient, off by `own`, lets its others be off by."""
    entries = sum(array.size for array in exact.values())
    tree = max(FACTOR * own.tree, FLOOR_ULPS * 2 * u, bound if entries < FEW else 0.0)
    return Distances(
        tree,
        {
            name: max(FACTOR * own.parameters[name], tree, bound if array.size < FEW else 0.0)
            for name, array in exact.items()
        },
    )


def _reference(reference: Any, like: Arrays) -> Arrays:
    exact = named_arrays(reference, "reference")
    _same_names(exact, like, "reference", ValueError)
    for name, array in exact.items():
        if array.dtype not in (np.float64, np.complex128):
            raise ValueError(
                f"reference is {array.dtype} at {shown(name)}, and must be float64 (complex128 "
                "where complex): compute it under jax.enable_x64, or as NumPy or PyTorch float64."
            )
    if found := non_finite({"reference": exact}):
        raise ValueError(found)
    return exact


def _nnx(name: str) -> bool:
    return name.endswith("/value")


def _same_names(tree: Arrays, want: Arrays, argument: str, error: type[Exception]) -> None:
    """Raises `error` unless a tree has the names and shapes of `want`."""
    missing, extra = sorted(want.keys() - tree.keys()), sorted(tree.keys() - want.keys())
    if missing or extra:
        lists = [
            f"{argument} {has} {', '.join(map(shown, names))}"
            for has, names in (("lacks", missing), ("alone has", extra))
            if names
        ]
        raise error(
            f"{argument} and want are gradients of different parameters: {'; '.join(lists)}. "
            "Names are paths joined with /: rename on one side"
            + (" (NNX: nnx.to_pure_dict(state))." if any(_nnx(n) for n in tree | want) else ".")
        )
    for name, array in tree.items():
        if array.shape != want[name].shape:
            raise error(
                f"{shown(name)} has shape {array.shape} in {argument} and {want[name].shape} in "
                "want: transpose or reshape on one side."
            )

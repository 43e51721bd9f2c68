"""Probes: sequences of groups, cut so that the candidates predict different things."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_accum.doctor._case import Case, poisoned, stack, with_labels
from jax_accum.doctor._sums import Oracle

Tree = Any
TRIES = 32
ALONE = "one microbatch"


@dataclasses.dataclass(frozen=True)
class Probe:
    """A sequence of groups.

    Attributes:
      name: what it is for.
      groups: lists of microbatches.
      examples: by group and microbatch, the indices of the case's examples in it.
    """

    name: str
    groups: list[list[Tree]]
    examples: list[list[list[int]]]


def example_weights(case: Case, oracle: Oracle) -> np.ndarray:
    """Of each example, its weight in the first term."""
    found = []
    for example in case.examples:
        found.append(next(iter(oracle.weights(stack([example])).values())))
    return np.array(found)


def plan(case: Case, oracle: Oracle) -> dict[str, Probe]:
    """The probes of a case by name, in the order in which they are run.

    Raises:
      ValueError: there is nothing supervised in the examples.
    """
    weights = example_weights(case, oracle)
    if not weights.any():
        raise ValueError("examples have no weight at all: nothing in them is supervised.")
    a = case.microbatches
    ragged = a - 1 if a > 2 else 1
    first, second, third = cut(case, weights, [a, a, a], case.seed)
    probes = [
        made(case, ALONE, [first[:1]]),
        made(case, "two full groups", [first, second]),
    ]
    for name in case.examined:
        if name == "ragged":
            probes.append(made(case, "a partial group", [first, second[:ragged], third]))
            continue
        probe = made(case, NAMES[name], [first, second, third])
        middle = probe.groups[1]
        if name == "nonfinite":
            middle[0] = poisoned(middle[0], case.labels)
        elif name == "ignored":
            middle[1] = ignored(case, middle[1])
        else:
            middle[:] = [ignored(case, mb) for mb in middle]
        probes.append(probe)
    return {probe.name: probe for probe in probes}


NAMES = {
    "ragged": "a partial group",
    "ignored": "an all-ignored microbatch",
    "empty": "a group without supervision",
    "nonfinite": "a group with an inf",
}


def separating(case: Case, oracle: Oracle, number: int, groups: int = 3) -> Probe:
    """Another cut of the same examples, and other sizes of groups, for candidates still alike."""
    a = case.microbatches
    sizes = [a, a, a] if number % 2 == 0 else [a, max(1, a - 2), a]
    sizes = sizes[:groups]
    cuts = cut(case, example_weights(case, oracle), sizes, case.seed + 101 + number)
    return made(case, f"another cut ({', '.join(map(str, sizes))} microbatches)", cuts)


def made(case: Case, name: str, cuts: Sequence[Sequence[list[int]]]) -> Probe:
    """A probe of these examples."""
    groups = [[stack([case.examples[i] for i in rows]) for rows in group] for group in cuts]
    return Probe(name, groups, [[list(rows) for rows in group] for group in cuts])


def ignored(case: Case, microbatch: Tree) -> Tree:
    """The microbatch with every label ignored."""
    assert case.labels is not None
    return with_labels(microbatch, case.labels, lambda x: np.full_like(x, case.ignore_index))


def cut(case: Case, weights: np.ndarray, sizes: list[int], seed: int) -> list[list[list[int]]]:
    """Groups of microbatches of examples, of many cuts the one with the most uneven weights.

    Uneven between the microbatches of a group, and between the replicas over a group: where
    they are equal, a mean of means is right.
    """
    rng = np.random.default_rng(seed)
    rows, replicas = case.microbatch_size, case.replicas
    best: tuple[float, list[list[list[int]]]] = (-1.0, [])
    for _ in range(TRIES):
        order = _stream(rng, len(case.examples), sum(sizes) * rows * replicas)
        groups, uneven = [], np.inf
        for size in sizes:
            block = order[: size * rows * replicas].reshape(size, rows * replicas)
            order = order[size * rows * replicas :]
            share = weights[block].reshape(size, replicas, rows).sum(-1)
            if not share.all():
                uneven = -0.5  # a replica without weight hides too much
            elif size > 1:
                uneven = min(uneven, float(np.std(share.sum(1)) / share.sum(1).mean()))
            if replicas > 1 and uneven >= 0:
                own = share.sum(0)
                uneven = min(uneven, float(np.std(own) / own.mean()))
            groups.append(block.tolist())
        if uneven > best[0]:
            best = (float(uneven), groups)
    if not best[1]:
        raise ValueError(
            "some microbatch or replica has no weight in every cut that was tried: give examples "
            "with more supervised tokens."
        )
    return best[1]


def _stream(rng: np.random.Generator, examples: int, wanted: int) -> np.ndarray:
    """Shuffled examples, again and again where there are too few."""
    rounds = -(-wanted // examples)
    return np.concatenate([rng.permutation(examples) for _ in range(rounds)])[:wanted]

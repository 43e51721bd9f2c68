"""Whether a loss is a sum over its examples, so that it can be split at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_accum.doctor._case import parts
from jax_accum.doctor._probes import ignored
from jax_accum.doctor._sums import Oracle
from jax_accum.doctor._vectors import norm

Tree = Any


def not_additive(oracle: Oracle, batches: list[Tree], allowed: float) -> float:
    """How far microbatches' gradients, per weight, are from those of their examples, relative.

    With labels, an example is first looked at among others whose labels are ignored, in a
    microbatch of the same shape: nothing has to be compiled for that. Only where this is more than
    `allowed` apart is it looked at alone, which decides.
    """
    if oracle.case.labels is not None:
        apart = _apart(oracle, batches, among_ignored=True)
        if apart <= allowed:
            return apart
    return _apart(oracle, batches, among_ignored=False)


def _apart(oracle: Oracle, batches: list[Tree], *, among_ignored: bool) -> float:
    worst = 0.0
    everything = [rows for batch in batches for rows in parts(batch, oracle.case.replicas)]
    for rows, others in zip(everything, everything[1:] + everything[:1], strict=True):
        whole = oracle.part(oracle.params, rows)
        pieces = _among(rows, ignored(oracle.case, others)) if among_ignored else _alone(rows)
        singles = [oracle.part(oracle.params, piece) for piece in pieces]
        for name, term in whole.items():
            own = [one[name] for one in singles if one[name].weight]
            if not term.weight or not term.finite or not own:
                continue
            # Per weight: a term that each microbatch has once weighs as much in a small one.
            mean = term.gradient / term.weight
            weight = sum(one.weight for one in own)
            together = np.sum([one.gradient for one in own], axis=0) / weight
            size = max(norm(mean), *(norm(one.gradient) / weight for one in own))
            if size:
                worst = max(worst, norm(mean - together) / size)
    return worst


def _alone(rows: Tree) -> Iterator[Tree]:
    """Each example as a microbatch of one."""
    for i in range(jax.tree.leaves(rows)[0].shape[0]):
        yield jax.tree.map(lambda x, i=i: x[i : i + 1], rows)


def _among(rows: Tree, others: Tree) -> Iterator[Tree]:
    """Each example in its place, all other places taken by others' rows."""
    for i in range(jax.tree.leaves(rows)[0].shape[0]):
        here = np.arange(jax.tree.leaves(rows)[0].shape[0]) == i

        def choose(x: Any, y: Any, here: Any = here) -> Any:
            return np.where(here.reshape(-1, *[1] * (np.ndim(x) - 1)), x, y)

        yield jax.tree.map(choose, rows, others)

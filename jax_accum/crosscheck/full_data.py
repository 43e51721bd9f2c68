"""The groups of the full matrix as arrays, and how each side cuts them into microbatches.

Shape legend: n rows of a group, B rows of a batch, T positions, A microbatches, D replicas, m rows
of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jax_accum.crosscheck.data import Example, make_groups
from jax_accum.crosscheck.matrix import (
    ATTEMPTS,
    EXAMPLES_PER_UPDATE,
    REPLICAS,
    FullCase,
)

LENGTH = 24
BOOST = 1e30
COEFFICIENTS = {"tokens": 1.0, "sequences": 4.0, "positions": 0.1}
INITIAL_SCALE = 2.0**10
GROWTH_INTERVAL = 2

Batch = dict[str, NDArray]


@dataclass(frozen=True)
class RowGroup:
    """The rows of one attempt.

    Args:
      examples: where they come from.
      arrays: ``tokens`` int32 ``[n, T]``; ``mask`` bool ``[n, T]``, true where a token is
        supervised; ``boost`` float32 ``[n]``, the largest of which multiplies the loss of a
        microbatch: 1, or enough to overflow float16.
      skip: why it makes no update, or None.
    """

    examples: tuple[Example, ...]
    arrays: Batch
    skip: str | None = None

    @property
    def rows(self) -> int:
        """Examples, n."""
        return len(self.examples)

    @property
    def tokens(self) -> int:
        """Supervised targets: the denominator of the first term."""
        return int(self.arrays["mask"][:, 1:].sum())

    @property
    def weights(self) -> dict[str, int]:
        """The denominators of the three terms."""
        mask = self.arrays["mask"]
        return {
            "tokens": self.tokens,
            "sequences": int(mask.any(axis=1).sum()),
            "positions": int(mask.sum()),
        }

    def pieces(self, microbatches: int, replicas: int) -> list[list[Batch]]:
        """``[a][d]``: the rows that replica d takes in turn a; fewer than m, or none, at the end.

        Turns without any row are left out. Every side cuts the same rows in this order.
        """
        size = EXAMPLES_PER_UPDATE // (microbatches * replicas)
        cut = [_rows(self.arrays, i, i + size) for i in range(0, self.rows, size)]
        cut += [_rows(self.arrays, self.rows, self.rows)] * (-len(cut) % replicas)
        return [cut[i : i + replicas] for i in range(0, len(cut), replicas)]

    def microbatches(self, size: int) -> list[Batch]:
        """Of one replica, padded to ``size`` rows that weigh nothing."""
        starts = range(0, self.rows, size)
        return [pad_rows(_rows(self.arrays, i, i + size), size) for i in starts]


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Zeros below the rows that are there: nothing real, nothing supervised."""
    missing = rows - len(batch["tokens"])
    return {
        name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
        for name, array in batch.items()
    }


def full_groups(case: FullCase, examples: Sequence[Example]) -> list[RowGroup]:
    """The groups of a case: the same examples for every case, whatever cuts them."""
    sizes = [EXAMPLES_PER_UPDATE] * (ATTEMPTS - 1) + [case.last_examples]
    groups = []
    for index, group in enumerate(make_groups(examples, sizes)):
        arrays = _arrays(group.examples)
        skip = case.skipped(index)
        if skip == "empty":
            arrays["mask"][:] = False
        elif case.group == "ignored":
            arrays["mask"][: _ignored_rows(case)] = False
        if skip == "nonfinite":
            arrays["boost"][:] = BOOST
        groups.append(RowGroup(group.examples, arrays, skip))
    return groups


def _ignored_rows(case: FullCase) -> int:
    """Rows that make up a whole microbatch on the side with the larger ones, where that may be."""
    alone = case.microbatches * min(case.jax_replicas, case.torch_replicas)
    if alone == 1:  # a group of one microbatch: that of one replica on the other side
        return EXAMPLES_PER_UPDATE // REPLICAS
    return EXAMPLES_PER_UPDATE // alone


def _arrays(examples: Sequence[Example]) -> Batch:
    tokens = np.zeros((len(examples), LENGTH), np.int32)
    mask = np.zeros((len(examples), LENGTH), bool)
    for row, example in enumerate(examples):
        kept = example.tokens[:LENGTH]
        tokens[row, : len(kept)], mask[row, : len(kept)] = kept, True
    boost = np.ones(len(examples), np.float32)
    return {"tokens": tokens, "mask": mask, "boost": boost}


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    return {name: array[start:stop] for name, array in batch.items()}


def expected_counters(
    groups: Sequence[RowGroup], microbatches: int, replicas: int, *, to_last_weight: bool
) -> dict[str, int]:
    """What a side must count, from the rows alone.

    Args:
      groups: the attempts.
      microbatches: A.
      replicas: D.
      to_last_weight: a compiled group does not compute what stands behind a replica's last
        microbatch with a weight, and does not count it; a loop counts every one with a row in it.
    """
    seen = 0
    for group in groups:
        turns = group.pieces(microbatches, replicas)
        for d in range(replicas):
            mine = [turn[d] for turn in turns]
            if to_last_weight:
                weighty = [i for i, piece in enumerate(mine) if piece["mask"].any()]
                seen += weighty[-1] + 1 if weighty else 0
            else:
                seen += sum(len(piece["tokens"]) > 0 for piece in mine)
    skips = [group.skip for group in groups]
    return {
        "microbatches": seen,
        "examples": sum(group.rows for group in groups),
        "tokens": sum(group.tokens for group in groups),
        "attempts": len(groups),
        "updates": skips.count(None),
        "skipped_nonfinite": skips.count("nonfinite"),
        "skipped_empty": skips.count("empty"),
    }


def expected_scales(groups: Sequence[RowGroup]) -> list[float]:
    """The loss scale of each attempt: halved after an overflow, doubled after clean ones in a row.

    A group in which nothing was supervised says nothing about the scale.
    """
    scale, clean, history = INITIAL_SCALE, 0, []
    for group in groups:
        history.append(scale)
        if group.skip == "nonfinite":
            scale, clean = scale / 2, 0
        elif group.skip is None:
            clean += 1
            if clean == GROWTH_INTERVAL:
                scale, clean = scale * 2, 0
    return history

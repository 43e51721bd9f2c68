"""Flat float64 vectors: made of trees, and how long they are."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def flat(tree: Any) -> np.ndarray:
    """The leaves of a tree, one after the other, in float64."""
    return np.concatenate(
        [np.ravel(np.asarray(x)).astype(np.float64) for x in jax.tree.leaves(tree)]
    )


def norm(vector: np.ndarray) -> float:
    """L2 norm of a flat vector.

    Not `np.linalg.norm`, which hands it to BLAS: its threads wait for each other by spinning, and
    on a machine whose cores are busy one such product takes a hundred times as long.
    """
    return float(np.sqrt(np.einsum("i,i->", vector, vector)))

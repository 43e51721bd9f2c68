"""Toy problems whose right answer is a small number, and one GPT small enough for exact oracles."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# Without PyTorch nothing here is collected; fixtures that nobody asks for do no harm.
collect_ignore_glob: list[str] = []
if importlib.util.find_spec("torch") is None:
    collect_ignore_glob.append("*")
else:
    import torch
    from torch import Tensor, nn

    from torch_ref.losses import Weighted
    from torch_ref.models import GPT, GPTConfig

    class Dot(nn.Module):
        """One parameter vector; the loss of an example is its dot product with the data."""

        def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(width, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.w.dtype) @ self.w


@pytest.fixture
def dot() -> Callable[..., Any]:
    """`dot(width, dtype)`: a model whose gradient on an example is the example itself."""
    return Dot


@pytest.fixture
def dot_loss() -> Callable[..., Any]:
    """Sum of dot products over tokens, weight the number of tokens."""

    def loss_fn(model: nn.Module, x: Tensor) -> Weighted:
        return Weighted(model(x).sum(), torch.tensor(len(x)))

    return loss_fn


@pytest.fixture
def tiny_gpt() -> Callable[..., Any]:
    """`tiny_gpt(dtype=…)`: two layers, 16 features, 32 tokens of vocabulary."""

    def make(dtype: Any = None, seed: int = 0) -> GPT:
        config = GPTConfig(vocab_size=32, max_length=16, layers=2, heads=2, width=16)
        return GPT(config, dtype=dtype or torch.float32, seed=seed)

    return make


@pytest.fixture
def ragged_rows() -> Tensor:
    """8 rows of 12 tokens, 1 to 12 of them real and 0 after that: very different weights."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(1, 32, (8, 12), generator=generator)
    for row, length in enumerate([12, 2, 7, 1, 12, 3, 9, 5]):
        rows[row, length:] = 0
    return rows


@pytest.fixture
def distance() -> Callable[..., float]:
    """Relative L2 distance over a whole tree of arrays, in float64."""

    def relative(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
        assert got.keys() == want.keys()
        off = sum(((got[k].astype("f8") - want[k].astype("f8")) ** 2).sum() for k in want)
        return float(np.sqrt(off / sum((want[k].astype("f8") ** 2).sum() for k in want)))

    return relative

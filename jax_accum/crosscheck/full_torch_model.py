"""The model of the full matrix in PyTorch, its losses, and their weights from the batch alone.

Shape legend: B rows, T positions, C width of a token, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jax_accum.crosscheck.full_data import Batch
from torch_ref.losses import Weighted, next_token_cross_entropy, next_token_targets

VOCABULARY, WIDTH, HIDDEN = 256, 8, 16


class PairModel(nn.Module):
    """Each token and the one before it, a hidden layer, a norm, a head: ``[B, T]`` to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens_BxT: Tensor) -> Tensor:
        """Integer tokens ``[B, T]`` to logits ``[B, T, V]``."""
        x_BxTxC = self.tok_emb(tokens_BxT)
        before_BxTxC = F.pad(x_BxTxC, (0, 0, 1, 0))[:, :-1]
        both = torch.cat([x_BxTxC, before_BxTxC], dim=-1)
        return self.head(self.norm(F.gelu(self.mix(both), approximate="tanh")))


def tensors(batch: Batch) -> dict[str, Tensor]:
    """The arrays of a microbatch as tensors; tokens int64."""
    made = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}
    return made | {"tokens": made["tokens"].long()}


def loss_one(model: Any, batch: Mapping[str, Tensor]) -> Weighted:
    """Cross entropy by supervised tokens."""
    return _tokens(model(batch["tokens"]), batch)


def loss_three(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Weighted]:
    """Cross entropy by tokens; squared mean logits by sequences; squared normaliser by positions.

    The second and the third term are in float32 at least, like the first.
    """
    logits, mask = model(batch["tokens"]), batch["mask"]
    first = _tokens(logits, batch)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    length_B = mask.sum(dim=1)
    some_B = length_B > 0
    pooled_BxV = torch.where(mask[..., None], logits, 0).sum(dim=1)[some_B]
    pooled_BxV = pooled_BxV / length_B[some_B, None]
    z_BxT = torch.logsumexp(logits, dim=-1).square()
    return {
        "tokens": first,
        "sequences": Weighted(pooled_BxV.square().mean(dim=-1).sum(), some_B.sum()),
        "positions": Weighted(torch.where(mask, z_BxT, 0).sum(), mask.sum()),
    }


def _tokens(logits: Tensor, batch: Mapping[str, Tensor]) -> Weighted:
    total, weight = next_token_cross_entropy(logits, batch["tokens"], mask=batch["mask"])
    return Weighted(total * batch["boost"].max(), weight)


def weights_one(batch: Mapping[str, Tensor]) -> Tensor:
    """Supervised tokens."""
    return next_token_targets(batch["tokens"], mask=batch["mask"]).sum()


def weights_three(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The denominators of the three terms."""
    mask = batch["mask"]
    return {
        "tokens": weights_one(batch),
        "sequences": mask.any(dim=1).sum(),
        "positions": mask.sum(),
    }

"""A small GPT in plain PyTorch, written to be held against a twin in another framework.

The fact it stands for: every choice that two frameworks could make differently is made here in
the open. GELU is the tanh approximation, LayerNorm adds ``1e-5`` to the biased variance, attention
is written out and scaled by ``1 / sqrt(head width)``, and there is no dropout, because the random
streams of two frameworks never agree.

Shape legend: B rows, T positions, V vocabulary, C width, H heads, D width of one head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYER_NORM_EPS = 1e-5
INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Args:
      vocab_size: number of token IDs, V. The default holds every byte.
      max_length: longest row, in tokens: the size of the position table.
      layers: number of blocks.
      heads: attention heads per block, H; must divide ``width``.
      width: features per token, C.
      mlp_ratio: hidden features of the MLP, as a multiple of ``width``.

    Raises:
      ValueError: a size is below 1, or ``heads`` does not divide ``width``.

    >>> GPTConfig(width=64, heads=4).head_width
    16
    """

    vocab_size: int = 256
    max_length: int = 128
    layers: int = 2
    heads: int = 4
    width: int = 64
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_length", "layers", "heads", "width", "mlp_ratio"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}: give a positive size")
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width, got heads={self.heads} and width={self.width}: "
                "every head takes width / heads features"
            )

    @property
    def head_width(self) -> int:
        """Features of one head, D."""
        return self.width // self.heads


class Attention(nn.Module):
    """Causal self-attention: position t sees positions 0 to t and nothing later.

    Padding stands at the end of a row, so no supervised position ever sees it and it needs no
    mask of its own; what padding positions compute is dropped by the loss.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.o = nn.Linear(config.width, config.width)

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        """``[B, T, C]`` to ``[B, T, C]``."""
        rows, length, width = x_BxTxC.shape
        split = (rows, length, self.heads, width // self.heads)
        q_BxHxTxD = self.q(x_BxTxC).view(split).transpose(1, 2)
        k_BxHxTxD = self.k(x_BxTxC).view(split).transpose(1, 2)
        v_BxHxTxD = self.v(x_BxTxC).view(split).transpose(1, 2)
        scores_BxHxTxT = q_BxHxTxD @ k_BxHxTxD.transpose(2, 3) / math.sqrt(split[-1])
        later_TxT = torch.ones(length, length, dtype=torch.bool, device=x_BxTxC.device).triu(1)
        # Every position sees at least itself, so -inf never fills a whole row of scores.
        scores_BxHxTxT = scores_BxHxTxT.masked_fill(later_TxT, -math.inf)
        mixed_BxHxTxD = F.softmax(scores_BxHxTxT, dim=-1) @ v_BxHxTxD
        return self.o(mixed_BxHxTxD.transpose(1, 2).reshape(rows, length, width))


class MLP(nn.Module):
    """Up, GELU (tanh approximation), down."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_ratio * config.width)
        self.down = nn.Linear(config.mlp_ratio * config.width, config.width)

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        """``[B, T, C]`` to ``[B, T, C]``, each position by itself."""
        return self.down(F.gelu(self.up(x_BxTxC), approximate="tanh"))


class Block(nn.Module):
    """One pre-LN block: each half reads a normalised copy and adds to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.mlp = MLP(config)

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        """``[B, T, C]`` to ``[B, T, C]``."""
        x_BxTxC = x_BxTxC + self.attn(self.ln1(x_BxTxC))
        return x_BxTxC + self.mlp(self.ln2(x_BxTxC))


class GPT(nn.Module):
    """Token and learned position embeddings, pre-LN blocks, final LayerNorm, untied head.

    Parameter names are ``tok_emb.weight [V, C]``, ``pos_emb.weight [max_length, C]``,
    ``blocks.{i}.ln1``, ``.attn.q`` (``k``, ``v``, ``o``), ``.ln2``, ``.mlp.up``, ``.mlp.down``,
    ``ln_f`` and ``head.weight [V, C]``. Linear weights are ``[out, in]``; all but the head have a
    bias. The head shares nothing with the token table.

    Args:
      config: the sizes.
      dtype: of all parameters and activations: float32, float64 or bfloat16. Weights of a seed
        are drawn in float64 and rounded, so every dtype starts at the same point.
      seed: of the initial weights; matrices and tables are normal with deviation 0.02, the two
        projections back into the residual stream a further ``1 / sqrt(2 layers)`` smaller
        (Radford et al., 2019, section 2.3), biases 0 and LayerNorm scales 1.

    >>> model = GPT(GPTConfig(layers=1, width=8, heads=2), dtype=torch.float64)
    >>> tuple(model(torch.zeros(3, 5, dtype=torch.long)).shape)
    (3, 5, 256)
    """

    def __init__(
        self, config: GPTConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config.vocab_size, config.width)
        self.pos_emb = nn.Embedding(config.max_length, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.ln_f = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.to(dtype)
        self.draw_weights(seed)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """Draws the initial weights of ``seed`` anew; no global random state is touched."""
        generator = torch.Generator().manual_seed(seed)
        residual = 1 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if ".ln" in name or name.startswith("ln_f"):
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                back = name.endswith(("attn.o.weight", "mlp.down.weight"))
                parameter.copy_(drawn * INIT_STD * (residual if back else 1.0))

    def forward(self, tokens_BxT: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of integer tokens ``[B, T]``, T at most ``config.max_length``.

        Raises:
          ValueError: rows longer than the position table.
        """
        length = tokens_BxT.shape[1]
        if length > self.config.max_length:
            raise ValueError(
                f"tokens has rows of {length}, but max_length is {self.config.max_length}: "
                "cut the rows or raise GPTConfig.max_length"
            )
        positions_T = torch.arange(length, device=tokens_BxT.device)
        x_BxTxC = self.tok_emb(tokens_BxT) + self.pos_emb(positions_T)
        for block in self.blocks:
            x_BxTxC = block(x_BxTxC)
        return self.head(self.ln_f(x_BxTxC))

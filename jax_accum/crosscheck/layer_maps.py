"""Rules for the usual layers of Flax Linen, Flax NNX and Equinox, onto those of `torch.nn`.

Each function takes the path of a layer in the JAX tree and its name in the PyTorch module (empty
for the model itself), and returns the rules of its parameters. Linen and NNX lay their arrays
out alike; Equinox lays them out as PyTorch does.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jax_accum.crosscheck.rules import Rule

Library = Literal["linen", "nnx", "equinox"]


def dense(jax: str, torch: str, *, library: Library = "linen", bias: bool = True) -> list[Rule]:
    """A fully connected layer: Linen ``Dense``, NNX ``Linear``, Equinox ``Linear``.

    Flax kernels are ``[in, out]``, the others' weights ``[out, in]``.

    >>> dense("head", "head", bias=False)[0].axes
    (1, 0)
    """
    flax = _is_flax(library)
    weight = Rule(_at(jax, "kernel"), _of(torch, "weight"), axes=(1, 0))
    if not flax:
        weight = Rule(_at(jax, "weight"), _of(torch, "weight"))
    return [weight] + ([Rule(_at(jax, "bias"), _of(torch, "bias"))] if bias else [])


def conv(
    jax: str, torch: str, *, library: Library = "linen", bias: bool = True, dims: int = 2
) -> list[Rule]:
    """A convolution over ``dims`` axes.

    Flax kernels are ``[*window, in, out]``, the others' ``[out, in, *window]``; an Equinox bias
    is ``[out, 1, ...]``. Flax images are ``[B, H, W, C]`` and PyTorch's ``[B, C, H, W]``: a
    flattening behind the last convolution has to put its features in the same order on both sides.

    >>> conv("conv", "conv", bias=False)[0].axes
    (3, 2, 0, 1)
    """
    if _is_flax(library):
        axes = (dims + 1, dims, *range(dims))
        rules = [Rule(_at(jax, "kernel"), _of(torch, "weight"), axes=axes)]
        shift = Rule(_at(jax, "bias"), _of(torch, "bias"))
    else:
        rules = [Rule(_at(jax, "weight"), _of(torch, "weight"))]
        shift = Rule(_at(jax, "bias"), _of(torch, "bias"), axes=(tuple(range(dims + 1)),))
    return rules + ([shift] if bias else [])


def layer_norm(jax: str, torch: str, *, library: Library = "linen") -> list[Rule]:
    """A layer norm with scale and shift. Mind the epsilons: Flax adds 1e-6, PyTorch 1e-5.

    >>> [rule.jax for rule in layer_norm("ln", "ln")]
    ['ln/scale', 'ln/bias']
    """
    scale = "scale" if _is_flax(library) else "weight"
    return [
        Rule(_at(jax, scale), _of(torch, "weight")),
        Rule(_at(jax, "bias"), _of(torch, "bias")),
    ]


def batch_norm(jax: str, torch: str, *, library: Library = "linen") -> list[Rule]:
    """Scale and shift of a batch norm; its running statistics are no parameters.

    In eval mode both frameworks use the running statistics as they are: hand the same arrays to
    both. What training mode makes of them differs, see `pytorch_running_variance`; and a gradient
    taken in training mode depends on how a batch is cut, so that no accumulation reproduces it.
    """
    return layer_norm(jax, torch, library=library)


def embedding(jax: str, torch: str, *, library: Library = "linen") -> list[Rule]:
    """An embedding table ``[vocabulary, width]``.

    >>> embedding("tok_emb", "tok_emb")[0].jax
    'tok_emb/embedding'
    """
    table = "embedding" if _is_flax(library) else "weight"
    return [Rule(_at(jax, table), _of(torch, "weight"))]


def attention(
    jax: str,
    torch: str,
    *,
    library: Library = "linen",
    bias: bool = True,
    projections: tuple[str, str, str, str] | None = None,
) -> list[Rule]:
    """Multi-head attention onto `torch.nn.MultiheadAttention`, or onto four linear layers.

    Flax keeps ``[C, H, D]`` for each projection and ``[H, D, C]`` for the output, PyTorch one
    ``in_proj_weight [3 C, C]`` of query, key and value below each other. NNX hands over to
    `jax.nn.dot_product_attention`, which computes in float32 even in 64-bit mode: give it an
    ``attention_fn`` of your own for a float64 comparison.

    Args:
      jax: path of the layer.
      torch: name of the module.
      library: of the JAX layer. Equinox has no bias unless asked for.
      bias: whether the projections have one.
      projections: names, below ``torch``, of linear layers for query, key, value and output.

    >>> attention("attn", "attn", bias=False)[1].part
    (1, 3)
    """
    flax = _is_flax(library)
    ours = ("query", "key", "value", "out")
    if not flax:
        ours = ("query_proj", "key_proj", "value_proj", "output_proj")
    kernel = "kernel" if flax else "weight"
    rules = []
    for place, name in enumerate(ours):
        out = place == 3
        weight, shift = "in_proj_weight", "in_proj_bias"
        part: tuple[int, int] | None = (place, 3)
        if projections is not None:
            weight, shift, part = f"{projections[place]}.weight", f"{projections[place]}.bias", None
        elif out:
            weight, shift, part = "out_proj.weight", "out_proj.bias", None
        axes = ((2, (0, 1)) if out else ((1, 2), 0)) if flax else None
        path = _at(jax, name)
        rules.append(Rule(_at(path, kernel), _of(torch, weight), axes=axes, part=part))
        if bias:
            flat = ((0, 1),) if flax and not out else None
            rules.append(Rule(_at(path, "bias"), _of(torch, shift), axes=flat, part=part))
    return rules


def pytorch_running_variance(
    before: NDArray, after: NDArray, momentum: float, count: int
) -> NDArray:
    """The running variance that PyTorch would hold where Flax or Equinox holds ``after``.

    Flax puts the biased variance of a batch into the average, PyTorch the unbiased one, larger by
    ``n / (n - 1)``; what was in the average before is the same.

    Args:
      before: running variance before the batch, ``[C]``.
      after: running variance after it, on the JAX side.
      momentum: weight of ``before``: Flax's ``momentum``, one minus PyTorch's.
      count: values per channel, n: rows times positions of the batch.

    Raises:
      ValueError: ``count`` below 2.

    >>> pytorch_running_variance(np.array([1.0]), np.array([1.9]), momentum=0.9, count=11)
    array([2.])
    """
    if count < 2:
        raise ValueError(f"count must be at least 2, got {count}: one value has no variance")
    kept = momentum * np.asarray(before)
    return kept + (np.asarray(after) - kept) * (count / (count - 1))


def _is_flax(library: str) -> bool:
    if library not in ("linen", "nnx", "equinox"):
        raise ValueError(f"library must be 'linen', 'nnx' or 'equinox', got {library!r}")
    return library != "equinox"


def _at(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _of(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name

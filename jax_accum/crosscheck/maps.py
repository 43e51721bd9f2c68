"""Parameter maps: which JAX array is which PyTorch one, and how it is laid out there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_accum.crosscheck.gpt import GPTSizes

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Entry:
    """One parameter under its two names.

    Args:
      jax: path in the JAX tree, parted by ``/``.
      torch: name in the PyTorch ``state_dict``, parted by ``.``.
      transposed: the PyTorch array is the transpose. A Flax ``Dense`` kernel is ``[in, out]``,
        a ``torch.nn.Linear`` weight ``[out, in]``.
    """

    jax: str
    torch: str
    transposed: bool = False


class ParameterMap:
    """A one-to-one map between the parameters of two models, checked before it is used.

    Args:
      entries: one for each parameter.

    Raises:
      ValueError: a name is mapped twice on either side.

    >>> pair = ParameterMap([Entry("head/kernel", "head.weight", transposed=True)])
    >>> pair.to_torch({"head/kernel": np.zeros((3, 5))})["head.weight"].shape
    (5, 3)
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        for side in ("jax", "torch"):
            uses = Counter(getattr(entry, side) for entry in self.entries)
            twice = sorted(name for name, count in uses.items() if count > 1)
            if twice:
                raise ValueError(
                    f"entries map the {side} name {twice[0]!r} {uses[twice[0]]} times: "
                    "each parameter has exactly one counterpart"
                )

    def to_torch(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """NumPy arrays by JAX path, as NumPy arrays by PyTorch name.

        Raises:
          ValueError: ``arrays`` lacks a mapped name, or has one that is not mapped.
        """
        self._check_names("jax", arrays)
        return {e.torch: _laid_out(arrays[e.jax], e) for e in self.entries}

    def to_jax(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """NumPy arrays by PyTorch name, as NumPy arrays by JAX path.

        Raises:
          ValueError: ``arrays`` lacks a mapped name, or has one that is not mapped.
        """
        self._check_names("torch", arrays)
        return {e.jax: _laid_out(arrays[e.torch], e) for e in self.entries}

    def check(
        self, jax: Mapping[str, tuple[int, ...]], torch: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Holds the map against the shapes of the two models.

        Args:
          jax: shapes by JAX path.
          torch: shapes by PyTorch name.

        Raises:
          ValueError: names without a counterpart on either side (all are listed), or a pair
            whose shapes do not agree.
        """
        self._check_names("jax", jax)
        self._check_names("torch", torch)
        for entry in self.entries:
            want = tuple(jax[entry.jax])
            want = want[::-1] if entry.transposed else want
            if tuple(torch[entry.torch]) != want:
                how = "transposed " if entry.transposed else ""
                raise ValueError(
                    f"{entry.jax} {tuple(jax[entry.jax])} maps {how}to {want}, but "
                    f"{entry.torch} is {tuple(torch[entry.torch])}: mend the map or the sizes"
                )

    def _check_names(self, side: str, names: Iterable[str]) -> None:
        mapped, given = {getattr(entry, side) for entry in self.entries}, set(names)
        missing, unmapped = sorted(mapped - given), sorted(given - mapped)
        if missing or unmapped:
            parts = []
            if missing:
                parts.append(f"mapped but not in the {side} parameters: {', '.join(missing)}")
            if unmapped:
                parts.append(f"in the {side} parameters but not mapped: {', '.join(unmapped)}")
            raise ValueError("; ".join(parts))


def gpt_map(sizes: GPTSizes) -> ParameterMap:
    """The map between the Flax GPT and the PyTorch reference's, for models of ``sizes``."""
    entries = [
        Entry("tok_emb/embedding", "tok_emb.weight"),
        Entry("pos_emb/embedding", "pos_emb.weight"),
        Entry("ln_f/scale", "ln_f.weight"),
        Entry("ln_f/bias", "ln_f.bias"),
        Entry("head/kernel", "head.weight", transposed=True),
    ]
    for i in range(sizes.layers):
        for norm in ("ln1", "ln2"):
            entries.append(Entry(f"blocks_{i}/{norm}/scale", f"blocks.{i}.{norm}.weight"))
            entries.append(Entry(f"blocks_{i}/{norm}/bias", f"blocks.{i}.{norm}.bias"))
        for dense in ("attn/q", "attn/k", "attn/v", "attn/o", "mlp/up", "mlp/down"):
            jax, torch = f"blocks_{i}/{dense}", f"blocks.{i}.{dense.replace('/', '.')}"
            entries.append(Entry(f"{jax}/kernel", f"{torch}.weight", transposed=True))
            entries.append(Entry(f"{jax}/bias", f"{torch}.bias"))
    return ParameterMap(entries)


def initial_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Arrays:
    """Draws the weights that both models start from, float64 values that float32 holds exactly.

    Matrices and tables are normal with deviation 0.08, which at this width lets all layers
    matter from the first update. Biases and LayerNorm scales are drawn too, not left at 0 and 1:
    two that were swapped would go unseen.

    Returns:
      float64 arrays by JAX path.
    """
    random = np.random.default_rng(seed)
    weights = {}
    for path in sorted(shapes):
        drawn = random.standard_normal(shapes[path])
        if path.endswith("/scale"):
            drawn = 1 + 0.1 * drawn
        else:
            drawn = 0.08 * drawn
        weights[path] = drawn.astype(np.float32).astype(np.float64)
    return weights


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dictionary as a flat one, keys joined by ``/``.

    >>> flatten({"head": {"kernel": 1}})
    {'head/kernel': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`.

    >>> unflatten({"head/kernel": 1})
    {'head': {'kernel': 1}}
    """
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _laid_out(array: NDArray[Any], entry: Entry) -> NDArray[Any]:
    # A transpose is its own inverse, so one rule serves both directions.
    return np.ascontiguousarray(array.T) if entry.transposed else np.asarray(array)

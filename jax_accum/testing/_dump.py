"""Gradients on disk: NumPy .npz without pickle, safe to open whoever wrote it."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_accum.testing._names import Arrays, named_arrays, shown

META = "__meta__"
META_BYTES = 2**20
MAX_ARRAYS = 100_000
HEADER_BYTES = 10_000
# Types that .npy has no name for, and what they are stored as.
NARROW = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

# What zipfile raises on bytes that are not a whole file; OSError where an offset leads nowhere.
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,
)


class GradientDump(NamedTuple):
    """What a dump holds.

    Attributes:
      gradient: arrays by name, names joined with `/`.
      meta: what the writer said of it.
    """

    gradient: Arrays
    meta: dict[str, Any]


def gradient_dump(
    path: str | os.PathLike[str], tree: Any, meta: Mapping[str, Any] | None = None
) -> None:
    """Writes a gradient to a NumPy .npz file, for a comparison in another environment.

    Where `jax_accum` is not installed, such as beside PyTorch alone, `numpy.savez(path, **grads)`
    writes one that `gradient_load` reads. The file appears whole or not at all.

    Args:
      path: of the file.
      tree: any pytree of arrays, bfloat16 and float8 included.
      meta: what else to tell of it, as JSON has it: a version, the examples' IDs, a loss.

    Raises:
      TypeError: a leaf is no array of numbers, or `meta` is not what JSON can hold.
      ValueError: no leaf, two leaves of one name, or more `meta` than a mebibyte.

    Example:
      >>> folder = tempfile.TemporaryDirectory()
      >>> path = Path(folder.name, "gradient.npz")
      >>> gradient_dump(path, {"head": {"bias": np.ones(2)}}, {"examples": 8})
      >>> gradient_load(path)
      GradientDump(gradient={'head/bias': array([1., 1.])}, meta={'examples': 8})
      >>> folder.cleanup()
    """
    arrays = named_arrays(tree, "tree")
    if META in arrays:
        raise ValueError(f"tree holds the name {META!r}, which the dump keeps for itself: rename.")
    narrow = {n: a.dtype.name for n, a in arrays.items() if a.dtype.name in NARROW}
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc" and name not in narrow:
            raise TypeError(
                f"tree holds dtype {array.dtype} at {shown(name)}, which a dump cannot hold: "
                "convert it to float32, which holds its values exactly."
            )
    try:
        said = {"arrays": len(arrays), "dtypes": narrow, "meta": dict(meta or {})}
        text = json.dumps(said, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"meta must hold what JSON can: {error}.") from error
    if len(text) > META_BYTES:
        raise ValueError(
            f"meta takes {len(text)} bytes, over the {META_BYTES} that a dump may: put long "
            "lists into a file of their own."
        )
    handle, temporary = tempfile.mkstemp(dir=Path(path).parent, prefix=".gradient-")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as dump:
            # First, so that a directory that was cut short still tells how many there were.
            _write(dump, META, np.frombuffer(text, np.uint8))
            for name, array in arrays.items():
                stored = array.view(NARROW[narrow[name]]) if name in narrow else array
                _write(dump, name, stored)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def gradient_load(path: str | os.PathLike[str], *, max_bytes: int = 2**33) -> GradientDump:
    """Reads a gradient from a NumPy .npz file, and runs nothing that it holds.

    Nothing is unpickled, and sizes are checked before memory is taken.

    Args:
      path: of a file that `gradient_dump` or `numpy.savez` wrote (compressed too).
      max_bytes: the most that its arrays may take in memory together.

    Raises:
      FileNotFoundError: no such file.
      ValueError: it is no .npz file, is damaged or cut short, holds Python objects, or takes
        more than `max_bytes`; the message says which.

    Example: see `gradient_dump`.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as dump:
                arrays = _read_all(path, dump, max_bytes)
        except DAMAGE as error:
            raise ValueError(f"{path} is no whole .npz file: {error}.") from error
    narrow, meta = _read_meta(path, arrays)
    for name, dtype in narrow.items():
        if dtype not in NARROW or name not in arrays or arrays[name].dtype.name != NARROW[dtype]:
            raise ValueError(f"{path} says that {name!r} is {dtype!r}, but it is not stored so.")
        arrays[name] = arrays[name].view(jnp.dtype(dtype))
    if not arrays:
        raise ValueError(f"{path} holds no array: is it a dump of a gradient?")
    return GradientDump(arrays, meta)


def _write(dump: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with dump.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


def _read_all(path: Any, dump: zipfile.ZipFile, max_bytes: int) -> Arrays:
    members = dump.infolist()
    if len(members) > MAX_ARRAYS:
        raise ValueError(f"{path} holds {len(members)} arrays, more than {MAX_ARRAYS}.")
    # A member never yields more bytes than it declares, so that these sizes bound memory.
    total = sum(member.file_size for member in members)
    if total > max_bytes:
        raise ValueError(
            f"{path} holds {total} bytes of arrays, over max_bytes={max_bytes}: raise that if you "
            "trust who wrote it."
        )
    arrays: Arrays = {}
    for member in members:
        name, ends, rest = member.filename.rpartition(".npy")
        if not ends or rest:
            raise ValueError(f"{path} holds {member.filename!r}, which is no NumPy array.")
        if name in arrays:
            raise ValueError(f"{path} holds {name!r} twice.")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{path} is compressed in a way that NumPy does not use.")
        try:
            arrays[name] = _read(dump, member)
        except (ValueError, UnicodeError) as error:
            raise ValueError(f"{path} cannot be read at {shown(name)}: {error}") from error
    return arrays


def _read(dump: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One array, of numbers alone, of no more bytes than its member has."""
    with dump.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its header is of version {version}, not one that numbers need.")
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        with warnings.catch_warnings():  # of headers that Python 2 wrote; the numbers are checked
            warnings.simplefilter("ignore", UserWarning)
            shape, _, dtype = read(file, max_header_size=HEADER_BYTES)
        if dtype.kind not in "biufc":
            what = "Python objects, which are never loaded" if dtype.hasobject else f"{dtype}"
            raise ValueError(f"it holds {what}: a gradient is numbers.")
        size, left = dtype.itemsize, member.file_size - file.tell()
        for length in shape:
            size *= length
        if size != left or any(length < 0 for length in shape):
            raise ValueError(f"shape {shape} of {dtype} takes {size} bytes, but it has {left}.")
    with dump.open(member) as file:
        # Through the end, where the checksum is.
        array = np.lib.format.read_array(file, allow_pickle=False, max_header_size=HEADER_BYTES)
        file.read()
    return array


def _read_meta(path: Any, arrays: Arrays) -> tuple[dict[str, str], dict[str, Any]]:
    """Takes out what was said of the arrays: narrow types by name, and the writer's own words."""
    stored = arrays.pop(META, None)
    if stored is None:
        return {}, {}
    try:
        if stored.nbytes > META_BYTES:
            raise ValueError("it is too long")
        said = json.loads(stored.tobytes())
        count, narrow, meta = said["arrays"], said["dtypes"], said["meta"]
        texts = [*narrow.keys(), *narrow.values()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} holds a {META} that is not a dump's: {error}.") from error
    if not all(isinstance(text, str) for text in texts) or not isinstance(meta, dict):
        raise ValueError(f"{path} holds a {META} that is not a dump's.")
    if count != len(arrays):
        raise ValueError(f"{path} was written with {count} arrays, and {len(arrays)} are left.")
    return narrow, meta

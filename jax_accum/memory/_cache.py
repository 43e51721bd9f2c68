"""A cache of analyses on disk, keyed by the program itself and what compiles it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jax_accum.memory._analyze import Analysis

FORMAT = 1


def key_of(lowered: Any) -> str:
    """A digest of the lowered program, the versions, the device and the compiler's flags."""
    device = jax.devices()[0]
    about = [
        str(FORMAT),
        jax.__version__,
        jaxlib.__version__,
        device.platform,
        device.device_kind,
        str(getattr(device.client, "platform_version", "")),
        str(jax.device_count()),
        os.environ.get("XLA_FLAGS", ""),
        lowered.as_text(),
    ]
    return hashlib.sha256("\0".join(about).encode()).hexdigest()


def load(folder: Path, key: str) -> Analysis | None:
    """What is stored under a key; `None` if nothing is, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, LookupError):
        return Analysis.from_dict(json.loads((folder / f"{key}.json").read_text(encoding="utf-8")))
    return None


def store(folder: Path, key: str, analysis: Analysis) -> None:
    """Stores an analysis, whole or not at all. A folder that cannot be written to is no error."""
    partial = folder / f"{key}.{os.getpid()}.partial"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(analysis.as_dict()), encoding="utf-8")
        os.replace(partial, folder / f"{key}.json")

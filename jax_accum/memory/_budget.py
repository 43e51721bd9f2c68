"""Budgets of memory: bytes, "16GiB" or "80%" of a device, and sizes as a person reads them."""

from __future__ import annotations

import operator
import re
from typing import Any

import jax
import numpy as np

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
}
_FORMS = "Write a number of bytes (17179869184), '16GiB', '16GB', or '80%' of the device."


def as_bytes(budget: int | str | None, device: jax.Device | None = None) -> int:
    """A budget as a number of bytes.

    Args:
      budget: bytes, as an integer; text with a unit (B, kB, MB, GB, TB in powers of 1000, KiB,
        MiB, GiB, TiB in powers of 1024); a percentage of what `device` may use; `None` for all
        of that.
      device: the first local one, if not given.

    Raises:
      TypeError: neither an integer nor text.
      ValueError: text that cannot be read, a budget of 0 or less, more than 100%, or a
        share of a device that does not tell how much it has (a CPU).

    Example:
      >>> as_bytes("1.5GiB"), as_bytes("2 kB"), as_bytes(4096)
      (1610612736, 2000, 4096)
    """
    if budget is None:
        return device_limit(device)
    if isinstance(budget, str):
        return _from_text(budget, device)
    if isinstance(budget, (bool, np.bool_)):
        raise TypeError(f"budget must be bytes or text, got {budget!r}. {_FORMS}")
    try:
        n = operator.index(budget)
    except TypeError:
        raise TypeError(
            f"budget must be a whole number of bytes or text, got {budget!r}. {_FORMS}"
        ) from None
    if n < 1:
        raise ValueError(f"budget must be at least 1 byte, got {n}. {_FORMS}")
    return n


def device_limit(device: jax.Device | None = None) -> int:
    """Bytes that this process may use on a device, from its own counters.

    Raises:
      ValueError: the device has no such counter.
    """
    device = jax.local_devices()[0] if device is None else device
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if not limit:
        raise ValueError(
            f"budget cannot be taken from {device}: it does not say how much memory it has (CPUs "
            "do not). Give it, in bytes or as text: budget='16GiB'."
        )
    return int(limit)


def readable(n: float) -> str:
    """Bytes as a person reads them.

    Example:
      >>> readable(1536), readable(3 * 2**30), readable(12)
      ('1.50 KiB', '3.00 GiB', '12 B')
    """
    size, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return (
        f"{size:.0f} B"
        if unit == "B"
        else f"{size:.3g} {unit}"
        if size >= 100
        else (f"{size:.1f} {unit}" if size >= 10 else f"{size:.2f} {unit}")
    )


def _from_text(text: str, device: Any) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*", text, flags=re.ASCII)
    unit = match[2].lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise ValueError(f"budget cannot be read: {text!r}. {_FORMS}")
    number = float(match[1])
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError(f"budget must be above 0% and at most 100%, got {text!r}.")
        return int(device_limit(device) * number / 100)
    n = int(number * _UNITS[unit])
    if n < 1:
        raise ValueError(f"budget must be at least 1 byte, got {text!r}. {_FORMS}")
    return n

"""Memory of the devices of this process, now and at its peak, and how it was read."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import NamedTuple

import jax


class Memory(NamedTuple):
    """Memory of one device.

    Attributes:
      device: its name.
      now: bytes in use.
      peak: bytes in use at most, since the process began.
      how: how both were read.
    """

    device: str
    now: int
    peak: int
    how: str


def read_memory() -> list[Memory]:
    """Memory of each local device; where devices do not tell (CPU), that of the process."""
    found = []
    for device in jax.local_devices():
        if stats := device.memory_stats():
            now, peak = stats["bytes_in_use"], stats.get("peak_bytes_in_use", 0)
            name = f"{device.platform}:{device.id}"
            found.append(Memory(name, int(now), max(int(peak), int(now)), "device.memory_stats()"))
    return found or [_of_process()]


def _of_process() -> Memory:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        now = pages * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        now = peak
    return Memory("host", now, max(peak, now), "resident memory of the process")

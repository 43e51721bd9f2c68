"""Memory of the devices of this process, now and at its peak, and how it was read."""

from __future__ import annotations

import re
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
    return found or [process_memory()]


def process_memory() -> Memory:
    """Resident memory of this process.

    On Linux by its own counters: `getrusage` also counts the memory of the process that started
    this one, which can be many times as large.
    """
    how = "resident memory of the process"
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB$", status, re.MULTILINE))
        now, peak = (1024 * int(sizes[name]) for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1024
        now = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Memory("host", now, max(peak, now), how)

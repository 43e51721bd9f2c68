"""measure: memory of updates that really run, from counters of the devices where they have them."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

_STATM = Path("/proc/self/statm")
_PAUSE = 0.001  # seconds between two looks at the resident memory


class Usage(NamedTuple):
    """Memory of one device over one or more updates, in bytes.

    Attributes:
      device: its name; "host" where the process stands for devices that do not count.
      baseline: in use before.
      peak: the most in use.
      how: where both were read.
    """

    device: str
    baseline: int
    peak: int
    how: str


class Measured(NamedTuple):
    """Memory of the group that holds the first update, and of the later ones together."""

    first: tuple[Usage, ...]
    later: tuple[Usage, ...]


def measure(run: Callable[[], Any], *, updates: int = 3) -> Measured:
    """Runs several updates and reads baseline and peak, to hold against `analyze`.

    The first update is apart: it may compile, and what it leaves is the baseline of the rest.
    Counters of JAX devices keep one peak for the whole life of the process, so that a later peak
    below an earlier one is not seen: measure in a fresh process. Without counters (CPU) it is the
    resident memory of the process, looked at every millisecond: shorter peaks can be missed, and
    the rest of the process is in it. Compile before, and read differences of many MiB only.

    Args:
      run: makes one update and returns something that it ends with; it is waited for.
      updates: how many, at least 2.

    Raises:
      ValueError: fewer than 2 updates, or neither counters nor `/proc`.

    Example:
      >>> import jax.numpy as jnp
      >>> found = measure(lambda: jnp.ones(8 * 2**20), updates=2)  # 32 MiB
      >>> found.first[0].peak - found.first[0].baseline > 24 * 2**20
      True
    """
    if updates < 2:
        raise ValueError(
            f"updates must be at least 2, got {updates}: the first is not like the later ones."
        )
    first = _one(run)
    later = [_one(run) for _ in range(updates - 1)]
    worst = tuple(
        Usage(
            usages[0].device,
            max(usage.baseline for usage in usages),
            max(usage.peak for usage in usages),
            usages[0].how,
        )
        for usages in zip(*later, strict=True)
    )
    return Measured(first, worst)


def _one(run: Callable[[], Any]) -> tuple[Usage, ...]:
    devices = [device for device in jax.local_devices() if device.memory_stats()]
    if not devices:
        with _resident() as read:
            jax.block_until_ready(run())
        return (read(),)
    before = [_stats(device)["bytes_in_use"] for device in devices]
    jax.block_until_ready(run())
    return tuple(
        Usage(
            f"{device.platform}:{device.id}",
            int(baseline),
            int(_stats(device)["peak_bytes_in_use"]),
            "device.memory_stats(), peak since the process began",
        )
        for device, baseline in zip(devices, before, strict=True)
    )


def _stats(device: Any) -> dict[str, Any]:
    return device.memory_stats() or {}


@contextmanager
def _resident() -> Iterator[Callable[[], Usage]]:
    """Watches the resident memory; the yielded function tells, once the block has ended."""
    # What was freed goes back to the system as far as the C library (glibc) does that, or the
    # update would find it there and seem to need less.
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    baseline = _now()
    done, peak = threading.Event(), [baseline]

    def look() -> None:
        while not done.wait(_PAUSE):
            peak[0] = max(peak[0], _now())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: Usage("host", baseline, peak[0], "resident memory of the process, sampled")
        peak[0] = max(peak[0], _now())
    finally:
        done.set()
        thread.join()


def _now() -> int:
    import resource

    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        raise ValueError(
            "memory cannot be measured here: the devices have no counters, and the process's own "
            f"memory is read from {_STATM}, which this system does not have."
        ) from None
    return pages * resource.getpagesize()

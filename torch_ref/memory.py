"""What a group needs at its peak: the first one, which also makes the optimizer's state, and later.

The fact it stands for: the first group is another one than those after it. Gradients, optimizer
state and the allocator's caches do not exist before it, and what it leaves behind is the baseline
of the rest, so that one number for both misleads.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")
CLEAR_PEAK = Path("/proc/self/clear_refs")
RESET_PEAK_RSS = "5"  # proc(5): 5 sets the peak resident set to the current one
PAUSE = 0.002  # seconds between two looks, where there is no counter of the peak


@dataclass(frozen=True)
class Usage:
    """Memory of one device over one or more groups, in bytes.

    Attributes:
      baseline: in use before the group (of several groups, the largest).
      peak: the most in use at any moment of it.
      source: "allocator" (CUDA tensors), "peak counter" (resident set of this process, exact) or
        "samples" (resident set looked at every 2 ms: a shorter peak can be missed).
    """

    baseline: int
    peak: int
    source: str

    @property
    def above_baseline(self) -> int:
        """What the group needed on top of what was there, in bytes."""
        return self.peak - self.baseline


@dataclass(frozen=True)
class GroupMemory:
    """By device ("cpu", "cuda:0", …): the first group, and the worst of the later ones."""

    first: dict[str, Usage]
    later: dict[str, Usage]


def measure(run_group: Callable[[], Any], *, groups: int = 3) -> GroupMemory:
    """Runs ``run_group`` several times and reads the memory of every device.

    On the CPU it is the resident set of the whole process. Freed memory is returned to the system
    before each group as far as the C library does that, but small pieces stay: measure in a fresh
    process, and read differences of many MiB only.

    Args:
      run_group: one whole attempt, for instance a call of `torch_ref.train.update`.
      groups: how many to run, at least 2.

    Raises:
      ValueError: ``groups`` below 2, which would leave no later group.

    >>> kept = []
    >>> usage = measure(lambda: kept.append(torch.ones(2**20)))  # 4 MiB stay after each
    >>> sorted(usage.first) == sorted(usage.later), usage.first["cpu"].peak > 2**20
    (True, True)
    """
    if groups < 2:
        raise ValueError(
            f"groups must be at least 2, got {groups}: the first is not like later ones"
        )
    measured = [_measure_once(run_group) for _ in range(groups)]
    first, later = measured[0], measured[1:]
    worst = {
        device: Usage(
            baseline=max(usage[device].baseline for usage in later),
            peak=max(usage[device].peak for usage in later),
            source=first[device].source,
        )
        for device in first
    }
    return GroupMemory(first, worst)


def _measure_once(run_group: Callable[[], Any]) -> dict[str, Usage]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    before = {}
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before[device] = torch.cuda.memory_allocated(device)
    with _resident_set() as usage:
        run_group()
        for device in devices:
            torch.cuda.synchronize(device)
    measured = {"cpu": usage()}
    for device in devices:
        peak = torch.cuda.max_memory_allocated(device)
        measured[f"cuda:{device}"] = Usage(before[device], peak, "allocator")
    return measured


@contextmanager
def _resident_set() -> Iterator[Callable[[], Usage]]:
    """Watches this process's resident set; the yielded function tells, once the block has ended."""
    _give_back()
    baseline = _status("VmRSS")
    if _reset_peak():
        yield lambda: Usage(baseline, max(_status("VmHWM"), baseline), "peak counter")
        return
    done, peak = threading.Event(), [baseline]

    def look() -> None:
        while not done.wait(PAUSE):
            peak[0] = max(peak[0], _status("VmRSS"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: Usage(baseline, max(peak[0], baseline), "samples")
        peak[0] = max(peak[0], _status("VmRSS"))
    finally:
        done.set()
        thread.join()


def _give_back() -> None:
    """Returns freed memory to the system, or the next group would find it there and need none."""
    gc.collect()
    # glibc has it; elsewhere the baseline holds what the C library keeps.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    """Sets the kernel's peak counter back to the present; false where that is not allowed."""
    try:
        CLEAR_PEAK.write_text(RESET_PEAK_RSS)
    except OSError:
        return False
    # Some sandboxes accept the write and keep the old peak.
    return _status("VmHWM") <= _status("VmRSS") + 2**20


def _status(name: str) -> int:
    """One entry of /proc/self/status, in bytes."""
    if not STATUS.exists():
        raise OSError(f"{STATUS} does not exist: host memory is read on Linux only")
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {name}")

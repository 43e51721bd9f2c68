"""Replicas as processes of this machine: gloo on 127.0.0.1, bounded in time, no orphans.

The fact it stands for: a collective waits for everybody. When one process dies or hangs, somebody
else has to end the rest; a run of several processes always ends, with a result or an error.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
HOST = "127.0.0.1"


@contextmanager
def process_group(*, timeout: float = 60.0) -> Iterator[tuple[int, int]]:
    """Joins the process group that torchrun's environment variables describe, and leaves it.

    Args:
      timeout: seconds that any one collective may wait for the others.

    Yields:
      This process's rank, and the number of replicas.

    Raises:
      RuntimeError: not started by torchrun.
    """
    missing = [
        n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ
    ]
    if missing:
        raise RuntimeError(f"{missing} are not set: start the program with torchrun, or use spawn")
    _loopback()
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()  # whoever leaves first would break the others' last collective
    finally:
        dist.destroy_process_group()


def spawn(function: Callable[..., T], replicas: int, *args: Any, timeout: float = 120.0) -> list[T]:
    """Runs ``function(rank, *args)`` in as many new processes, joined in a process group.

    Args:
      function: importable by name in a new interpreter, as are its arguments and result (they are
        pickled).
      replicas: how many processes.
      *args: the same for all.
      timeout: seconds for everything; also what any one collective may wait.

    Returns:
      The results by rank.

    Raises:
      ValueError: ``replicas`` below 1.
      RuntimeError: a process raised (its traceback is in the message) or died (its exit status
        is); the others are ended.
      TimeoutError: not finished in time; all are ended.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}: one process each")
    deadline = time.monotonic() + timeout
    # The store lives here and chooses its own free port, so that no two runs can collide.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(
            target=_child,
            args=(function, rank, replicas, store.port, timeout, results, args),
            daemon=True,
        )
        for rank in range(replicas)
    ]
    try:
        for process in processes:
            process.start()
        return _collect(processes, results, deadline, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join()
        results.close()


def _collect(processes: list[Any], results: Any, deadline: float, timeout: float) -> list[Any]:
    """Waits for a result of every rank, and watches for processes that end without one."""
    found: dict[int, Any] = {}
    errors: dict[int, str] = {}
    trouble_since: float | None = None
    while len(found) < len(processes):
        with suppress(queue.Empty):
            rank, result, error = results.get(timeout=0.1)
            if error is None:
                found[rank] = result
            else:
                errors[rank] = error
        now = time.monotonic()
        died = {
            rank: process.exitcode
            for rank, process in enumerate(processes)
            if process.exitcode is not None and rank not in found and rank not in errors
        }
        if errors or died:
            # One replica's end breaks the connections of the others. A moment is left for all to
            # be heard, so that the cause is in the message and not only its consequences.
            trouble_since = trouble_since or now
            if now - trouble_since > 1:
                said = [f"replica {r} died, exit status {code}" for r, code in died.items()]
                said += [f"replica {r} raised:\n{errors[r]}" for r in errors]
                raise RuntimeError("; ".join(said))
        if now > deadline:
            waiting = sorted(set(range(len(processes))) - set(found))
            raise TimeoutError(f"replicas {waiting} did not finish within {timeout} seconds")
    return [found[rank] for rank in range(len(processes))]


def _child(
    function: Callable[..., Any],
    rank: int,
    replicas: int,
    port: int,
    timeout: float,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # the replicas share this machine's cores
    _loopback()
    try:
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(HOST, port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=replicas, timeout=limit)
        results.put((rank, function(rank, *args), None))
        dist.barrier()  # as in process_group
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        sys.exit(1)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its children, so that they watch it themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _loopback() -> None:
    """Gloo looks the host's name up unless told; sandboxes and laptops often cannot answer."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

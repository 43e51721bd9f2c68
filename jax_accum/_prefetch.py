"""prefetch: the next groups made, and on their devices, while the present one is trained."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_accum._checks import checked_int
from jax_accum._group import Group

HEAD_START = 1e-3
"""Seconds: long enough to dispatch a step, short beside one."""


def prefetch(
    groups: Iterable[Group],
    size: int = 2,
    *,
    mesh: Mesh | None = None,
    data_axes: str | tuple[str, ...] = ("data",),
) -> Iterator[Group]:
    """Groups from a thread that is at most `size` ahead, their batches on devices.

    Args:
      groups: what `jax_accum.groups` returns.
      size: groups that may wait, the one being made included: the bound on memory.
      mesh: shards each batch over its data axes, `[A, m * D, ...]` along the second. With several
        processes each hands over its share, and the batch is the global one. By default
        batches go whole to the default device.
      data_axes: names of the data axes of `mesh`.

    Yields:
      The groups, in order, their batches of `jax.Array`. What the stream raises is raised here,
      after the groups that came before it. The thread ends with this generator.

    Raises:
      ValueError: `size` below 1.

    Example:
      >>> import numpy as np, jax_accum as ja
      >>> plan = ja.BatchPlan(microbatch_size=2, microbatches=1)
      >>> for group in ja.prefetch(ja.groups([{"x": np.arange(4)}], plan)):
      ...     print(group.ids, type(group.batch["x"]).__module__.partition(".")[0])
      (0, 1) jaxlib
      (2, 3) jaxlib
    """
    checked_int(size, "size")
    sharding = None
    if mesh is not None:
        names = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
        sharding = NamedSharding(mesh, PartitionSpec(None, names))
    return _from_thread(groups, size, sharding)


def _from_thread(
    groups: Iterable[Group], size: int, sharding: NamedSharding | None
) -> Iterator[Group]:
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A queue of permits: in C, one system call to pass one on, where a Semaphore takes several.
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(size):
        room.put(None)
    stop = threading.Event()

    def work() -> None:
        try:
            source = iter(groups)
            while True:
                room.get()
                # With a group in hand there is no hurry. The consumer is about to dispatch its
                # step, and gives up the GIL where JAX frees the arrays of the group before:
                # begun now, the next group would be made in the middle of that.
                if not ready.empty():
                    stop.wait(HEAD_START)
                if stop.is_set():
                    return
                ready.put(_placed(next(source), sharding))
        except StopIteration:
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=work, name="jax_accum.prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            room.put(None)
            yield item
    finally:
        stop.set()
        room.put(None)
        thread.join(timeout=60)


def _placed(group: Group, sharding: NamedSharding | None) -> Group:
    if sharding is None:
        batch = jax.device_put(group.batch)
    elif jax.process_count() == 1:
        batch = jax.device_put(group.batch, sharding)
    else:
        batch = jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x), group.batch
        )
    return dataclasses.replace(group, batch=batch)

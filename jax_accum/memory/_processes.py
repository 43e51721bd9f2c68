"""Agreement of the processes of a run on what an attempt came to, beside the devices.

Not by a collective of the devices: a process that could not start its program would never join
one that the others wait in. The coordination service that `jax.distributed` runs anyway holds
small texts, and every wait for it is bounded.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax

OK, EXHAUSTED, FAILED = "ok", "exhausted", "failed"

_names = itertools.count()


class Processes:
    """All processes of the run, which call `agree` the same number of times.

    Args:
      timeout: seconds that one agreement may take.

    Raises:
      RuntimeError: several processes, but no coordination service between them.
    """

    def __init__(self, timeout: float) -> None:
        self.count = jax.process_count()
        self._timeout = timeout
        # The same in all processes, which make their steps in the same order.
        self._name = f"jax_accum/fitting/{next(_names)}"
        self._turn = 0
        self._client = _client() if self.count > 1 else None

    def agree(self, status: str) -> list[str]:
        """The status of every process, by index, once all have given theirs.

        Raises:
          TimeoutError: one has not within the timeout.
        """
        if self._client is None:
            return [status]
        turn, self._turn = self._turn, self._turn + 1
        own = jax.process_index()
        self._client.key_value_set(f"{self._name}/{turn}/{own}", status)
        found = []
        for i in range(self.count):
            try:
                said = self._client.blocking_key_value_get(
                    f"{self._name}/{turn}/{i}", int(self._timeout * 1000)
                )
            except jax.errors.JaxRuntimeError as error:
                raise TimeoutError(
                    f"process {i} did not say within {self._timeout:g} seconds how the attempt "
                    f"went, which here is {status!r}. It may wait in a collective that this "
                    "process never joined: end all of them, and start again with a smaller "
                    "microbatch."
                ) from error
            found.append(said)
        if turn > 1:
            # All have read what was written two turns ago, or they could not have come here.
            self._client.key_value_delete(f"{self._name}/{turn - 2}/{own}")
        return found


def _client() -> Any:
    # JAX has no public name for the client; libraries of checkpoints and data take it from here.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "several processes need the coordination service of jax.distributed.initialize() to "
            "agree on a microbatch size."
        )
    return client

"""memory_growth: whether arrays pile up over groups, and of what kind."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from jax_accum.doctor._case import Case
from jax_accum.doctor._probes import plan
from jax_accum.doctor._runs import Subject
from jax_accum.doctor._sums import Oracle

WARM_UP = 2
"""Groups before the first count: compilation and the optimizer's first state come with them."""


@dataclasses.dataclass(frozen=True)
class Growth:
    """Memory over groups.

    Attributes:
      live_bytes: of all arrays that are reachable after each group, warm-up left out.
      device_bytes: what the device says it has in use, where it says so.
      kinds: of array that are more after every group than after the one before, with how many
        more and how many bytes more per group.
    """

    live_bytes: list[int]
    device_bytes: list[int]
    kinds: list[tuple[str, float, float]]

    @property
    def grows(self) -> bool:
        """Whether something is kept from every group."""
        return bool(self.kinds)

    def __str__(self) -> str:
        if not self.grows:
            return f"Nothing piles up: {self.live_bytes[-1]} bytes live after every group."
        lines = [
            f"Memory grows: {self.live_bytes[0]} bytes live after the first group that was "
            f"measured, {self.live_bytes[-1]} after the last. What stays, per group:"
        ]
        lines += [f"  {count:g} × {kind}, {size:g} bytes" for kind, count, size in self.kinds]
        return "\n".join(lines)


def memory_growth(
    update: Callable[..., Any] | None = None,
    case: Case | None = None,
    *,
    grad: Callable[..., Any] | None = None,
    groups: int = 5,
) -> Growth:
    """Runs a step for several groups and counts the arrays that stay.

    Counted are JAX arrays, NumPy arrays and PyTorch tensors that something still refers to, after
    a garbage collection; a tensor that keeps its graph is called so.

    Args:
      update: as for `diagnose`.
      case: as for `diagnose`.
      grad: as for `diagnose`.
      groups: how many are measured, after the warm-up.

    Raises:
      ValueError: `groups` below 2.
      UnusableStepError: as `diagnose`.

    Example:
      >>> import numpy as np, jax.numpy as jnp, jax_accum as ja
      >>> def loss_fn(w, batch):
      ...     return ja.Weighted(jnp.sum((w - batch["x"]) ** 2), batch["x"].size)
      >>> losses = []
      >>> def grad(w, microbatches):
      ...     losses.append(sum(loss_fn(w, b).total for b in microbatches))
      ...     return w
      >>> examples = [{"x": np.ones(2, np.float32)}] * 16
      >>> case = ja.doctor.Case(params=np.ones(2, np.float32), examples=examples, loss_fn=loss_fn)
      >>> ja.doctor.memory_growth(grad=grad, case=case).kinds
      [('jax.Array float32 of shape ()', 1.0, 4.0)]
    """
    if not isinstance(case, Case):
        raise TypeError(f"case must be a doctor.Case, got {type(case).__name__}.")
    if groups < 2:
        raise ValueError(f"groups must be at least 2, got {groups}: growth is a difference.")
    subject = Subject(case, update, grad)
    group = plan(case, Oracle(case))["two full groups"].groups[0]
    params, state = subject.begin()
    counted, device = [], []
    for i in range(WARM_UP + groups):
        out = subject.call(params, state, group)
        if not subject.gradient_only:
            params, state = out[0], out[1]
        del out
        if i >= WARM_UP:
            counted.append(live_arrays())
            stats = jax.local_devices()[0].memory_stats() or {}
            device.append(int(stats.get("bytes_in_use", 0)))
    kinds = []
    for kind in counted[-1]:
        numbers = [found.get(kind, (0, 0))[0] for found in counted]
        if all(b > a for a, b in pairwise(numbers)):
            sizes = [found.get(kind, (0, 0))[1] for found in counted]
            each = len(counted) - 1
            kinds.append((kind, (numbers[-1] - numbers[0]) / each, (sizes[-1] - sizes[0]) / each))
    live = [sum(size for _, size in found.values()) for found in counted]
    return Growth(live, device if any(device) else [], sorted(kinds, key=lambda k: -k[2]))


def live_arrays() -> dict[str, tuple[int, int]]:
    """By kind of array: how many there are, and their bytes."""
    gc.collect()
    number: Counter[str] = Counter()
    size: Counter[str] = Counter()

    def add(kind: str, nbytes: int) -> None:
        number[kind] += 1
        size[kind] += nbytes

    for x in jax.live_arrays():
        add(f"jax.Array {x.dtype} of shape {x.shape}", x.nbytes)
    torch = sys.modules.get("torch")
    seen: set[int] = set()
    for owner in gc.get_objects():
        candidates = [owner] if torch is not None else []
        if type(owner) in (dict, list, tuple, set):
            candidates += gc.get_referents(owner)
        for x in candidates:
            if id(x) in seen:
                continue
            if type(x) is np.ndarray:
                seen.add(id(x))
                add(f"numpy.ndarray {x.dtype} of shape {x.shape}", x.nbytes)
            elif torch is not None and issubclass(type(x), torch.Tensor):
                seen.add(id(x))
                graph = " that keeps its graph" if x.grad_fn is not None else ""
                kind = f"torch.Tensor {str(x.dtype)[6:]} of shape {tuple(x.shape)}{graph}"
                add(kind, x.element_size() * x.nelement())
    return {kind: (number[kind], size[kind]) for kind in number}

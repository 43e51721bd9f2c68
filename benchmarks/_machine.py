"""What the figures were measured on, and what that machine could do at best."""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib.metadata
import os
import platform
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._timing import interleaved


def description() -> dict[str, Any]:
    """Hardware, versions and date."""
    packages = ("jax", "jaxlib", "optax", "flax", "numpy", "torch")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": dt.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
        "python": platform.python_version(),
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@dataclasses.dataclass(frozen=True)
class Limits:
    """What bounds any way of doing it, measured in the same run.

    Attributes:
      bytes_per_second: read and written by an in-place update of an array far larger than any
        cache.
      flops_per_second: of a large matrix product of float32, as the framework does it by default.
    """

    bytes_per_second: float
    flops_per_second: float

    def least(self, moved: float = 0.0, flops: float = 0.0) -> float:
        """Seconds that moving so many bytes, then so many flops, take at least."""
        return moved / self.bytes_per_second + flops / self.flops_per_second


def limits(*, quick: bool = False) -> Limits:
    """Measures them."""
    n = 2**20 if quick else 2**26
    side = 256 if quick else 2048
    bump = jax.jit(lambda x: x * 0.5 + 1.0, donate_argnums=0)
    product = jax.jit(jnp.matmul)
    x = jnp.ones(n, jnp.float32)
    a = jnp.ones((side, side), jnp.float32)

    def move() -> None:
        nonlocal x
        x = bump(x).block_until_ready()

    def multiply() -> None:
        product(a, a).block_until_ready()

    seconds = interleaved({"move": move, "multiply": multiply}, rounds=3 if quick else 7)
    return Limits(2 * x.nbytes / min(seconds["move"]), 2 * side**3 / min(seconds["multiply"]))

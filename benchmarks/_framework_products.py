"""The matrix products of a layer by themselves: how fast a framework has them on this device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._timing import interleaved, quartiles


def shapes(size: dict[str, int], rows: int) -> list[tuple[int, int]]:
    """Of the input of an MLP, its first matrix, and the gradient of their product."""
    n, c = rows * size["max_length"], size["width"]
    return [(n, c), (c, 4 * c), (n, 4 * c)]


def product_flops(size: dict[str, int], rows: int) -> float:
    """Of the three products: the output, and the gradients of the input and of the matrix."""
    (n, c), (_, hidden), _ = shapes(size, rows)
    return 3.0 * 2 * n * c * hidden


def product_seconds(framework: str, size: dict[str, int], rows: int) -> float:
    """Of the three products in float32, for a microbatch of `rows` rows; a median."""
    rng = np.random.default_rng(0)
    factors = [rng.normal(size=shape).astype(np.float32) for shape in shapes(size, rows)]
    call = _in_jax(*factors) if framework.startswith("jax") else _in_torch(*factors)
    return quartiles(interleaved({"": call}, rounds=25, warm_up=3)[""])[1]


def _in_jax(x: Any, w: Any, g: Any) -> Callable[[], None]:
    import jax
    import jax.numpy as jnp

    x, w, g = (jnp.asarray(a) for a in (x, w, g))
    three = [
        (jax.jit(lambda x, w: x @ w), x, w),
        (jax.jit(lambda g, w: g @ w.T), g, w),
        (jax.jit(lambda x, g: x.T @ g), x, g),
    ]

    def call() -> None:
        for product, a, b in three:
            product(a, b).block_until_ready()

    return call


def _in_torch(x: Any, w: Any, g: Any) -> Callable[[], None]:
    import torch

    from benchmarks._framework_program import torch_on_gpu

    device = "cuda" if torch_on_gpu() else "cpu"
    x, w, g = (torch.as_tensor(a, device=device) for a in (x, w, g))
    kernel = w.T.contiguous()  # as torch.nn.Linear has it

    def call() -> None:
        for a, b in ((x, kernel.T), (g, kernel), (g.T, x)):
            torch.mm(a, b)
            if device == "cuda":
                torch.cuda.synchronize()

    return call

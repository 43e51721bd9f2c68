"""Parts of the model by themselves, forward and backward: where two frameworks differ in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

PARTS = ("attention", "MLP")


def part_times(framework: str, size: dict[str, int], rows: int) -> dict[str, float]:
    """Seconds of the attention and the MLP of one layer, float32, for a microbatch of `rows` rows.

    The output, then its gradient by the input and by the parameters.
    """
    rng = np.random.default_rng(0)
    shape = (rows, size["max_length"], size["width"])
    x, g = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    made = _in_jax if framework.startswith("jax") else _in_torch
    calls = made(size, x, g, framework == "torch.compile")
    return {name: _fastest(calls[name]) for name in PARTS}


def _in_jax(size: dict[str, int], x: Any, g: Any, compiled: bool) -> dict[str, Callable[[], None]]:
    import jax
    import jax.numpy as jnp

    from jax_accum.crosscheck.gpt import MLP, Attention, GPTSizes

    del compiled  # it always is
    sizes = GPTSizes(**size)
    x, g = jnp.asarray(x), jnp.asarray(g)

    def call(module: Any) -> Callable[[], None]:
        params = module.init(jax.random.key(0), x)
        grad = jax.jit(jax.grad(lambda p, x: jnp.sum(module.apply(p, x) * g), argnums=(0, 1)))
        return lambda: jax.block_until_ready(grad(params, x))

    return {"attention": call(Attention(sizes)), "MLP": call(MLP(sizes))}


def _in_torch(
    size: dict[str, int], x: Any, g: Any, compiled: bool
) -> dict[str, Callable[[], None]]:
    import torch

    from benchmarks._framework_program import torch_on_gpu
    from torch_ref.models import MLP, Attention, GPTConfig

    device = "cuda" if torch_on_gpu() else "cpu"
    config = GPTConfig(vocab_size=256, **size)
    x, g = torch.as_tensor(x, device=device).requires_grad_(), torch.as_tensor(g, device=device)

    def call(module: Any) -> Callable[[], None]:
        module.to(device)
        forward = torch.compile(module) if compiled else module

        def run() -> None:
            module.zero_grad(set_to_none=True)
            x.grad = None
            (forward(x) * g).sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    return {"attention": call(Attention(config)), "MLP": call(MLP(config))}


def _fastest(call: Callable[[], None]) -> float:
    for _ in range(3):
        call()
    seconds = []
    for _ in range(25):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)

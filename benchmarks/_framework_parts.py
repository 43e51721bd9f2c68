"""Parts of the model by themselves, forward and backward: where two frameworks differ in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._timing import interleaved


def part_times(framework: str, size: dict[str, int], rows: int) -> dict[str, float]:
    """Seconds of the attention and the MLP of one layer, float32, for a microbatch of `rows` rows.

    The output, then its gradient by the input and by the parameters.
    """
    rng = np.random.default_rng(0)
    shape = (rows, size["max_length"], size["width"])
    x, g = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    if framework.startswith("jax"):
        calls = _in_jax(size, x, g)
    else:
        calls = _in_torch(size, x, g, compiled=framework == "torch.compile")
    seconds = interleaved(calls, rounds=25, warm_up=3)
    return {name: min(values) for name, values in seconds.items()}


def _in_jax(size: dict[str, int], x: Any, g: Any) -> dict[str, Callable[[], None]]:
    import jax
    import jax.numpy as jnp

    from jax_accum.crosscheck.gpt import MLP, Attention, GPTSizes

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

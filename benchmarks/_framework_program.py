"""One framework in a process of its own: tokens per second of an update, and the memory it took."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = {
    "tiny": {"layers": 1, "heads": 2, "width": 32, "max_length": 16},
    "small": {"layers": 4, "heads": 4, "width": 128, "max_length": 128},
    "larger": {"layers": 6, "heads": 8, "width": 320, "max_length": 128},
}


def data(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[rows, length]`, and which are supervised."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (rows, length))
    mask = np.arange(length) < rng.integers(length // 4, length + 1, (rows, 1))
    return tokens, mask


def flops(size: dict[str, int]) -> float:
    """Of an update, per token: 6 per parameter in a matrix product, and attention."""
    c, t = size["width"], size["max_length"]
    return 6 * (size["layers"] * (12 * c * c + 2 * t * c) + 256 * c)


def jax_update(
    size: dict[str, int], rows: int, a: int, narrow: bool, by_hand: bool = False
) -> Callable[[], float]:
    """An update by `make_train_step`, or by a scan in plain JAX; returns the loss."""
    import jax
    import jax.numpy as jnp
    import optax

    import jax_accum as ja
    from jax_accum.crosscheck.gpt import GPT, GPTSizes, parameter_shapes
    from jax_accum.crosscheck.maps import initial_weights, unflatten

    if not narrow:  # as PyTorch has it: an accelerator may not round the factors
        jax.config.update("jax_default_matmul_precision", "highest")
    sizes = GPTSizes(**size)
    model = GPT(sizes)
    tokens, mask = data(rows, size["max_length"])
    batch = {"tokens": jnp.asarray(tokens, jnp.int32), "mask": jnp.asarray(mask)}
    weights = unflatten(initial_weights(parameter_shapes(sizes), 0))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)

    def loss_fn(params: Any, batch: Any) -> ja.Weighted:
        if narrow:
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        logits = model.apply({"params": params}, batch["tokens"])
        return ja.losses.next_token_cross_entropy(logits, batch["tokens"], mask=batch["mask"])

    tx = optax.adamw(1e-3, weight_decay=1e-2)
    state = tx.init(params)

    def plain(params: Any, state: Any, batch: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        tokens = jnp.sum(batch["mask"][:, 1:]).astype(jnp.float32)

        def body(carry: Any, part: Any) -> tuple[Any, None]:
            one = jax.value_and_grad(lambda p: loss_fn(p, part).total / tokens)(params)
            return jax.tree.map(jnp.add, carry, one), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        parts = jax.tree.map(lambda x: x.reshape(a, -1, *x.shape[1:]), batch)
        (loss, grads), _ = jax.lax.scan(body, zeros, parts)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": loss}

    if by_hand:
        step = jax.jit(plain, donate_argnums=(0, 1))
    else:
        step = ja.make_train_step(loss_fn, tx, a)

    def update() -> float:
        nonlocal params, state
        params, state, metrics = step(params, state, batch)
        jax.block_until_ready(params)
        return float(metrics["loss"])

    return update


def torch_update(
    size: dict[str, int], rows: int, a: int, narrow: bool, compiled: bool
) -> Callable[[], float]:
    """An update by the loop of `torch_ref`; returns the loss."""
    import torch

    from jax_accum.crosscheck.gpt import GPTSizes, parameter_shapes
    from jax_accum.crosscheck.maps import gpt_map, initial_weights
    from torch_ref.losses import next_token_cross_entropy
    from torch_ref.models import GPT, GPTConfig

    torch.set_num_threads(2)
    sizes = GPTSizes(**size)
    model = GPT(GPTConfig(vocab_size=256, **size))
    weights = gpt_map(sizes).to_torch(initial_weights(parameter_shapes(sizes), 0))
    model.load_state_dict(
        {name: torch.tensor(x, dtype=torch.float32) for name, x in weights.items()}
    )
    device = "cuda" if torch_on_gpu() else "cpu"
    model.to(device)
    forward = torch.compile(model) if compiled else model
    tokens, mask = data(rows, size["max_length"])
    parts = [
        (torch.as_tensor(t, device=device), torch.as_tensor(m, device=device))
        for t, m in zip(np.split(tokens, a), np.split(mask, a), strict=True)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    total = float(mask[:, 1:].sum())

    def update() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for t, m in parts:
            with torch.autocast(device, torch.bfloat16, enabled=narrow):
                value = next_token_cross_entropy(forward(t), t, mask=m)
            share = value.total / total
            share.backward()
            loss += float(share.detach())
        optimizer.step()
        return loss

    return update


def torch_on_gpu() -> bool:
    """Whether PyTorch takes the GPU: where JAX was told to, or told nothing."""
    import torch

    return torch.cuda.is_available() and os.environ.get("JAX_PLATFORMS", "cuda") != "cpu"


def peak(framework: str) -> float:
    """Bytes, at most, so far: of the GPU by the framework's own counter, else of the process."""
    if framework.startswith("jax"):
        import jax

        counted = jax.devices()[0].memory_stats()
        if counted and jax.devices()[0].platform == "gpu":
            return float(counted["peak_bytes_in_use"])
    elif torch_on_gpu():
        import torch

        return float(torch.cuda.max_memory_allocated())
    from jax_accum._peaks import process_memory

    return float(process_memory().peak)


def main() -> None:
    """Answers on standard output: a line when ready, then one for every line read.

    To `products` the seconds of a layer's products, to anything else an update's loss.
    """
    framework, size_name, rows, a, dtype = sys.argv[1:]
    given = SIZES[size_name], int(rows), int(a), dtype == "bfloat16"
    make: dict[str, Callable[[], Any]] = {
        "jax": lambda: jax_update(*given),
        "jax, by hand": lambda: jax_update(*given, by_hand=True),
        "torch": lambda: torch_update(*given, compiled=False),
        "torch.compile": lambda: torch_update(*given, compiled=True),
    }
    update = make[framework]()
    update()
    update()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if line.strip() == "products":
            from benchmarks._framework_products import product_seconds

            seconds = product_seconds(framework, SIZES[size_name], int(rows) // int(a))
            print(json.dumps({"seconds": seconds}), flush=True)
            continue
        loss = update()  # a number on the host: the device has ended
        print(json.dumps({"loss": loss, "peak": peak(framework)}), flush=True)


if __name__ == "__main__":
    main()

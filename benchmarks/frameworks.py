"""How many tokens a second does the same update take in, in JAX and in PyTorch?"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks._framework_products import product_flops
from benchmarks._framework_program import SIZES, data, flops
from benchmarks._machine import Limits
from benchmarks._result import Claim, Figure, Result, Table, show
from benchmarks._timing import decided, interleaved, quartiles, ratio

OURS = "jax"
BY_HAND = "jax, by hand"
FASTER = "the faster of PyTorch's"
MOST = 16
"""Rounds after which a ratio that is near 1 stays undecided."""


class Process:
    """A framework in a process of its own, which updates when it is told to."""

    def __init__(self, framework: str, size: str, rows: int, a: int, dtype: str):
        command = [sys.executable, "-m", "benchmarks._framework_program", framework, size]
        self.peak = 0.0
        self.process = subprocess.Popen(
            [*command, str(rows), str(a), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )

    def read(self) -> dict[str, Any]:
        """The next answer; the first is that it has compiled and updated twice."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the process ended with status {self.process.wait()}")

    def update(self) -> None:
        """One update, waited for."""
        self.peak = self.ask("update")["peak"]

    def ask(self, what: str) -> dict[str, Any]:
        """One `update`, or the `products` of a layer."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def measure(
    result: Result, size: str, rows: int, a: int, dtype: str, rounds: int, limits: Limits
) -> None:
    """All frameworks at one size and precision, in turn."""
    label = size if dtype == "float32" else f"{size}, {dtype}"
    torch = ["torch", "torch.compile"] if importlib.util.find_spec("torch") else []
    names = [OURS, BY_HAND, *torch]
    tokens = rows * SIZES[size]["max_length"]
    processes: dict[str, Process] = {}
    try:
        for name in names:
            processes[name] = Process(name, size, rows, a, dtype)
        for process in processes.values():  # they started together
            process.read()
        updates = {name: process.update for name, process in processes.items()}
        seconds = interleaved(updates, rounds=rounds, warm_up=0)
        if torch:
            faster = min(torch, key=lambda name: quartiles(seconds[name])[1])
            pair: dict[str, Callable[[], None]] = {way: updates[way] for way in (faster, OURS)}
            both = decided(pair, 1.0, most=MOST, seconds=seconds)
            claimed = result.add(ratio(f"{label}/{FASTER}/time over jax", both, faster, OURS))
        products: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(3):
            for name in names:
                products[name].append(processes[name].ask("products")["seconds"])
    finally:
        for process in processes.values():
            process.close()
    least = limits.least(flops=product_flops(SIZES[size], rows // a))
    most = 1 / limits.least(flops=flops(SIZES[size]))
    table: list[list[Any]] = []
    for name in names:
        over = result.add(ratio(f"{label}/{name}/time over jax", seconds, name, OURS))
        low, middle, high = quartiles([tokens / s for s in seconds[name]])
        rate = result.add(
            Figure(f"{label}/{name}/rate", middle, low, high, "tokens/s", False, "higher")
        )
        held = processes[name].peak / 2**20
        peak = result.add(Figure(f"{label}/{name}/memory", held, held, held, "MiB"))
        low, middle, high = quartiles([least / s for s in products[name]])
        speed = result.add(
            Figure(f"{label}/{name}/products", middle, low, high, "of the limit", False, "higher")
        )
        table.append([name, rate, over, peak, rate.value / most, speed])
    if torch:
        table.append([f"{FASTER}: {faster}", "", claimed, "", "", ""])
        result.add(ratio(f"{label}/products over torch", products, OURS, "torch"))
    sizes = SIZES[size]
    result.tables.append(
        Table(
            f"{label}: {sizes['layers']} layers of width {sizes['width']}, {rows} rows, A = {a}",
            [
                "framework",
                "tokens per second",
                "time over jax",
                "peak, MiB",
                "of the limit",
                "products alone, of the limit",
            ],
            [*table, ["physical limit", f"{most:,.0f}", "", "", "", ""]],
            f"AdamW, {dtype} in the model, 2 threads each, every framework in a process of its "
            "own, in turn. The faster of PyTorch's two ways, on which the claim is, takes more "
            "turns with ours while they are near each other. By hand: a scan in plain JAX, without "
            "jax_accum. Peak: of the GPU by the framework's counter, without one of the process. "
            "The limit: flops of the matrix products over the matrix rate measured in this run; "
            "the share of it is what is called model flops utilisation. Products alone: those of "
            "the MLP's first half and of its gradients, float32, outside of the model.",
        )
    )


def claims(result: Result) -> list[Claim]:
    """One, on where ours is furthest behind, or least ahead, of the faster of PyTorch's ways."""
    found = [figure for figure in result.figures if f"/{FASTER}/" in figure.key]
    if not found:  # without PyTorch
        return []
    worst = min(found, key=lambda figure: figure.value)
    label = worst.key.split("/")[0]
    by_hand = result.figure(f"{label}/{BY_HAND}/time over jax").value
    products = result.figure(f"{label}/products over torch").value
    return [
        Claim(
            "jax_accum is at least as fast as torch_ref, eager and compiled, at every size",
            worst.key,
            1.0,
            at_most=False,
            why=f"here {label}, where it is furthest behind: plain JAX without jax_accum takes "
            f"{show(by_hand)} of ours; XLA's products of matrices by themselves take "
            f"{show(products)} times as long as PyTorch's: the time goes to XLA's programs for "
            "this device, not to accumulation",
        )
    ]


def run(*, limits: Limits, quick: bool = False, full: bool = False) -> Result:
    """The benchmark; with bfloat16 in the model too where there is a GPU, or if `full`."""
    import jax

    result = Result("frameworks", __doc__ or "")
    assert data(1, 16)[0].shape == (1, 16)
    kinds = ["float32"]
    if full or jax.default_backend() == "gpu":
        kinds.append("bfloat16")
    for size, rows, a in [("tiny", 4, 2)] if quick else [("small", 32, 4), ("larger", 16, 4)]:
        for dtype in kinds:
            measure(result, size, rows, a, dtype, 3 if quick else 7, limits)
    result.claims += claims(result)
    return result

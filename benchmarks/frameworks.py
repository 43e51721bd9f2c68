"""How many tokens a second does the same update take in, in JAX and in PyTorch?"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks._framework_program import SIZES, data
from benchmarks._result import Claim, Figure, Result, Table
from benchmarks._timing import quartiles, ratio


class Process:
    """A framework in a process of its own, which updates when it is told to."""

    def __init__(self, framework: str, size: str, rows: int, a: int):
        command = [sys.executable, "-m", "benchmarks._framework_program", framework, size]
        self.process = subprocess.Popen(
            [*command, str(rows), str(a)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )
        self.read()

    def read(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the process ended with status {self.process.wait()}")

    def update(self) -> dict[str, Any]:
        """One update."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
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


def measure(result: Result, size: str, rows: int, a: int, rounds: int) -> None:
    """All frameworks at one size, in turn."""
    names = ["jax"]
    if importlib.util.find_spec("torch"):
        names += ["torch", "torch.compile"]
    tokens = rows * SIZES[size]["max_length"]
    processes: dict[str, Process] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = {}
    try:
        for name in names:
            processes[name] = Process(name, size, rows, a)
        for i in range(rounds):
            for name in names if i % 2 == 0 else reversed(names):
                answer = processes[name].update()
                seconds[name].append(answer["seconds"])
                peaks[name] = answer["peak"]
    finally:
        for process in processes.values():
            process.close()
    table = []
    for name in names:
        low, middle, high = quartiles([tokens / s for s in seconds[name]])
        rate = result.add(
            Figure(f"{size}/{name}/rate", middle, low, high, "tokens/s", False, "higher")
        )
        over = result.add(ratio(f"{size}/{name}/time over jax", seconds, name, "jax"))
        peak = result.add(Figure(f"{size}/{name}/memory", *[peaks[name] / 2**20] * 3, "MiB"))
        table.append([name, rate, over, peak])
        if name != "jax":
            result.claims.append(
                Claim(
                    f"{size}: jax_accum is at least as fast as torch_ref ({name})",
                    f"{size}/{name}/time over jax",
                    1.0,
                    at_most=False,
                )
            )
    sizes = SIZES[size]
    result.tables.append(
        Table(
            f"{size}: {sizes['layers']} layers of width {sizes['width']}, {rows} rows, A = {a}",
            ["framework", "tokens per second", "time over jax", "peak of the process, MiB"],
            table,
            "AdamW, float32, 2 threads each, every framework in a process of its own, in turn.",
        )
    )


def run(*, quick: bool = False, full: bool = False) -> Result:
    """The benchmark."""
    del full
    result = Result("frameworks", __doc__ or "")
    assert data(1, 16)[0].shape == (1, 16)
    for size, rows, a in [("tiny", 4, 2)] if quick else [("small", 32, 4), ("larger", 16, 4)]:
        measure(result, size, rows, a, 3 if quick else 7)
    return result

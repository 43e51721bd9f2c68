"""How many gradient reductions does an update cost, and how many bytes do they carry?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks._machine import Limits
from benchmarks._result import Claim, Plot, Result, Table

LINK = 25e9
LATENCY = 10e-6
RATE = 100e12


def child(devices: int, cuts: list[int], quick: bool) -> dict[str, dict[str, float]]:
    """The collectives of every way, from a process that sees so many CPU devices."""
    # Nothing is run: LLVM has the code of a program to make, but not to make it fast.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks._replica_program", str(devices), json.dumps(cuts)]
    done = subprocess.run(
        [*command, "quick" if quick else "whole"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the program for {devices} devices failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def predicted(reductions: float, parameters: float, tokens: float, replicas: int) -> float:
    """Seconds of an update by the model stated in `run`: compute, then ring all-reduces."""
    compute = 6 * parameters * tokens / replicas / RATE
    if replicas == 1:
        return compute
    ring = 2 * (replicas - 1) / replicas * 4 * parameters / LINK + 2 * (replicas - 1) * LATENCY
    return compute + reductions * ring


def scaling(result: Result) -> None:
    """Efficiency on up to 1,024 replicas by the model, with one reduction per update and with A."""
    parameters, a = 1e9, 16
    counts = [2**i for i in range(11)]
    for kind in ("strong", "weak"):
        series: dict[str, list[tuple[float, float]]] = {}
        for name, reductions in (("1 reduction per update", 1), (f"{a} reductions", a)):
            points = []
            for d in counts:
                tokens = 2**22 if kind == "strong" else 2**16 * d
                alone = predicted(reductions, parameters, tokens, 1)
                time = predicted(reductions, parameters, tokens, d)
                points.append((d, alone / d / time))
            series[name] = points
        result.plots.append(Plot(f"{kind} scaling, predicted", "replicas", "efficiency", series))
        last = counts[-1]
        rows = [[f"{d:,}", *[dict(points)[d] for points in series.values()]] for d in counts]
        result.tables.append(
            Table(
                f"{kind} scaling to {last:,} replicas: predicted efficiency, not measured",
                ["replicas", *series],
                rows,
                f"1e9 float32 parameters, {RATE:.0e} flop/s a replica, ring all-reduce over "
                f"{LINK:.0e} byte/s links with {LATENCY:.0e} s a hop, nothing overlapped; "
                + ("4 M tokens per update." if kind == "strong" else "64 K tokens a replica."),
            )
        )


def run(*, quick: bool = False, full: bool = False, limits: Limits | None = None) -> Result:
    """The benchmark: exact, from the compiled programs; time only by a stated model."""
    del full, limits
    result = Result("replicas", __doc__ or "")
    devices = [2] if quick else [1, 2, 4, 8]
    cuts = [2] if quick else [1, 8, 64]
    rows: list[list[Any]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    with ThreadPoolExecutor(2) as pool:  # a process compiles for the most part on one core
        programs = list(pool.map(lambda d: child(d, cuts, quick), devices))
    for d, ways in zip(devices, programs, strict=True):
        for key, found in ways.items():
            a, way = key.split("/", 1)
            for name, value in found.items():
                result.exact(f"D={d}/{key}/{name}", value, "P" if name == "payload" else "")
            if d == devices[-1]:
                names = ("inside", "after", "payload", "gathers")
                rows.append([a, way, *[found[name] for name in names]])
                series.setdefault(way, []).append((int(a[2:]), max(found["payload"], 1e-3)))
    columns = ["A", "way", "reductions in the loop", "after it", "payload per update, P", "gathers"]
    note = "Gradient reductions in the program; those in the loop run A times. P is one tree."
    result.tables.append(Table(f"{devices[-1]} devices", columns, rows, note))
    result.plots.append(
        Plot(
            "Bytes reduced per update", "microbatches A", "trees of parameters", series, log_y=True
        )
    )
    scaling(result)
    for d in devices:
        for a in cuts:
            if d == 1:
                continue
            for way in ("jax_accum, mesh", "jax_accum, own shard_map"):
                key = f"D={d}/A={a}/{way}"
                text = f"D = {d}, A = {a}, {way}"
                result.claims += [
                    Claim(f"{text}: payload of one tree", f"{key}/payload", 1.005),
                    Claim(f"{text}: no reduction in the loop", f"{key}/inside", 0),
                    Claim(f"{text}: the batch does not move", f"{key}/gathers", 0),
                ]
    return result

"""The command: `python -m benchmarks`, and `python -m benchmarks compare OLD NEW`."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NAMES = ("across_calls", "in_one_call", "replicas", "precision", "frameworks", "pipeline")


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    top.add_argument("--only", action="append", choices=NAMES, help="one benchmark; repeatable")
    top.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    top.add_argument("--full", action="store_true", help="larger models and more types")
    top.add_argument("--device", choices=("cpu", "gpu"), help="where (default: what JAX finds)")
    top.add_argument("--out", type=Path, default=Path("benchmark-report"), help="report folder")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["compare"]:
        return _compare(arguments[1:])
    asked = parser().parse_args(arguments)
    if asked.device:
        os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[asked.device]
    # Device counters mean something only if memory is taken when it is needed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    from benchmarks import _machine, _report  # after the environment is set
    from benchmarks._result import HOLDS

    results = []
    try:
        machine, limits = _machine.description(), _machine.limits(quick=asked.quick)
    except RuntimeError as error:
        print(f"no such device: {error}".splitlines()[0], file=sys.stderr)
        return 2
    for name in asked.only or NAMES:
        print(f"{name} ...", end=" ", flush=True)
        start = time.perf_counter()
        module = importlib.import_module(f"benchmarks.{name}")
        results.append(module.run(quick=asked.quick, full=asked.full, limits=limits))
        # After each, so that a run that is cut short leaves what it has found.
        page = _report.write(asked.out, results, machine, dataclasses.asdict(limits))
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        _forget()
    for verdict, *rest in _report.claims_table(results).rows:
        if verdict != HOLDS:
            print("  ".join(map(str, (verdict, *rest))))
    print(f"{_report.headline(results)} Report: {page}")
    return 0


def _forget() -> None:
    """Lets go of what a benchmark compiled, so that the next runs as it does by itself."""
    import jax

    jax.clear_caches()
    gc.collect()


def _compare(arguments: Sequence[str]) -> int:
    from benchmarks._compare import compare, incomparable, load

    top = argparse.ArgumentParser(prog="python -m benchmarks compare")
    top.add_argument("old", type=Path)
    top.add_argument("new", type=Path)
    asked = top.parse_args(arguments)
    try:
        old, new = load(asked.old), load(asked.new)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for name, what in sorted(incomparable(old, new).items()):
        print(f"{name}: not compared, for its configuration differs ({what})")
    worse = compare(old, new)
    print("\n".join(worse) if worse else "nothing is worse beyond the noise")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

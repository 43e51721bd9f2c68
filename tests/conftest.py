"""What every test stands on: JAX on the CPU, a bounded number of threads, shared fixtures."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before anything imports JAX or PyTorch. The test processes share the machine, so that each
# computes with one thread; the tests are about numbers, and GPU runs are the benchmarks'.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jax
import pytest

ROOT = Path(__file__).parents[1]

# Run in processes of their own, by `run_python`; importing them would already run them.
collect_ignore = ["programs"]

# The first example of a property compiles, so that a deadline for each would tell nothing. The
# examples are the same in every run: a change that fails does so for everybody.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("suite")


def pytest_report_header() -> str:
    torch = "installed" if importlib.util.find_spec("torch") else "not installed"
    return f"jax {jax.__version__}, PyTorch {torch}"


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types in JAX, for the length of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run a Python program in a process of its own and return what it printed.

    `run_python(program, *arguments, devices=8, timeout=120, **environment)`: `program` is a
    path or the source itself; `devices` the number of CPU devices that JAX sees in it. Warnings
    are errors there too. A program that fails or runs past `timeout` seconds fails the test, with
    the output of the program.
    """

    def run(
        program: str | Path,
        *arguments: str,
        devices: int = 1,
        timeout: float = 120,
        **environment: str,
    ) -> str:
        source = [str(program)] if isinstance(program, Path) else ["-c", program]
        flags = os.environ["XLA_FLAGS"] + f" --xla_force_host_platform_device_count={devices}"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        with subprocess.Popen(
            [sys.executable, "-W", "error", *source, *arguments],
            env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # with whatever the program itself started
                output, _ = process.communicate()
                pytest.fail(f"the program ran past {timeout} seconds; it printed:\n{output}")
        if process.returncode:
            pytest.fail(f"exit status {process.returncode}; the program printed:\n{output}")
        return output

    return run

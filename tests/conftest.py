"""What every test stands on: JAX on the CPU, a bounded number of threads, shared fixtures."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before anything imports JAX or PyTorch. The test processes share the machine, so that each
# computes with one thread; the tests are about numbers, and GPU runs are the benchmarks'.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_multi_thread_eigen=false"
    # Devices that wait for each other on busy cores: XLA would end the process after 40 seconds.
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["COLUMNS"] = "100"  # of a terminal, to which help and tables are fitted

import hypothesis
import jax
import pytest

ROOT = Path(__file__).parents[1]

# Run in processes of their own, by `run_python`; importing them would already run them.
collect_ignore = ["programs"]

# The first example of a property compiles, so that a deadline for each would tell nothing. Seeds
# are the same in every run: a change that fails does so for everybody.
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
    """Run a Python program in a process of its own and return its standard output.

    `run_python(program, *arguments, devices=8, timeout=800, **environment)`: `program` is a
    path or the source itself; `devices` the number of CPU devices that JAX sees in it. Warnings
    are errors there too. A program that fails or runs past `timeout` seconds fails the test, with
    the output of the program and what it said on standard error.
    """

    def run(
        program: str | Path,
        *arguments: str,
        devices: int = 1,
        timeout: float = 800,
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
            stderr=subprocess.PIPE,  # where XLA may write lines of its own
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # with whatever the program itself started
                output, errors = process.communicate()
                pytest.fail(
                    f"the program ran past {timeout} seconds; it printed:\n{output}{errors}"
                )
        if process.returncode:
            pytest.fail(f"exit status {process.returncode}; the program printed:\n{output}{errors}")
        return output

    return run


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1, below those that the kernel hands out to whoever asks for any."""
    for port in range(20_000 + os.getpid() * 37 % 10_000, 32_000):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")

"""A run of several processes ends in bounded time, whatever one of them does."""

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_ref import launch
from torch_ref.launch import process_group, spawn


def one_misbehaves(rank: int, how: str) -> None:
    if rank == 1:
        if how == "raises":
            raise KeyError("the reason")
        if how == "dies":
            os._exit(3)
        time.sleep(300)
    dist.all_reduce(torch.ones(1))  # waits for the other


@pytest.mark.parametrize(
    ("how", "error", "says", "timeout"),
    [
        ("raises", RuntimeError, "replica 1 raised(.|\n)*KeyError: 'the reason'", 120),
        ("dies", RuntimeError, "replica 1 died, exit status 3", 120),
        ("hangs", TimeoutError, r"replicas \[0, 1\] did not finish within 8", 8),
    ],
    ids=["one-raises", "one-dies", "one-hangs"],
)
def test_a_replica_that_does_not_finish_ends_the_run_and_leaves_no_process(
    how, error, says, timeout
) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=says):
        spawn(one_misbehaves, 2, how, timeout=timeout)
    assert time.monotonic() - start < 120
    assert multiprocessing.active_children() == []


class Process:
    """A process that ends with an exit status at a moment of its own."""

    def __init__(self, ends_at: float, status: int) -> None:
        self.ends_at = ends_at
        self.status = status

    @property
    def exitcode(self) -> int | None:
        return self.status if time.monotonic() > self.ends_at else None


def test_the_cause_is_named_even_when_its_consequence_is_heard_first() -> None:
    results: queue.Queue = queue.Queue()
    results.put((0, None, "Connection closed by peer"))
    now = time.monotonic()
    processes = [Process(now, 1), Process(now + 0.3, -9)]
    with pytest.raises(RuntimeError, match="replica 1 died, exit status -9; replica 0 raised:\nC"):
        launch._collect(processes, results, deadline=now + 60, timeout=60)


def test_fewer_than_one_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="replicas must be at least 1, got 0"):
        spawn(one_misbehaves, 0)


def test_outside_torchrun_the_process_group_says_how_to_start_it(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"'RANK'.*start the program with torchrun"):
        process_group().__enter__()


ORPHANS = """
import os, time
from torch_ref import launch
from torch_ref.launch import spawn

def wait(rank):
    os.write(1, f"{os.getpid()}\\n".encode())  # one write, so that two do not mix
    time.sleep(300)

if __name__ == "__main__":
    spawn(wait, 2)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills by signal")
def test_when_the_parent_is_killed_its_replicas_end_too(tmp_path) -> None:
    program = tmp_path / "orphans.py"
    program.write_text(ORPHANS)
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        children = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
        # They hold the pipe open for as long as they live: at its end both are gone.
        assert parent.communicate(timeout=30)[0] == ""
        limit = time.monotonic() + 20
        while any(running(child) for child in children):  # the pipe closes a moment earlier
            assert time.monotonic() < limit
            time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def running(pid: int) -> bool:
    """Whether a process still runs; one that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return not Path("/proc/self/stat").exists()  # gone since, or no such files here
    return status.rsplit(")", 1)[1].split()[0] not in "ZX"


TORCHRUN = """
import sys, torch
from torch_ref import launch
from torch_ref.launch import process_group
from torch_ref.losses import Weighted
from torch_ref.replicas import Replica

DATA = [[(1, 1.0), (3, 2.0)], [(2, 3.0), (10, 4.0)]]
with process_group() as (rank, replicas):
    model = torch.nn.Linear(1, 1, bias=False)
    replica = Replica(
        model, lambda m, x: Weighted(m(x).sum(), torch.tensor(len(x))), weights_fn=len
    )
    group = replica.accumulate(torch.full((n, 1), g) for n, g in DATA[rank])
    with open(f"{sys.argv[1]}/{rank}", "w") as out:
        print(replicas, group.tokens, model.weight.grad.item(), replica.reductions, file=out)
"""


def test_under_torchrun_the_replicas_find_each_other_and_reduce_once(tmp_path) -> None:
    program = tmp_path / "under_torchrun.py"
    program.write_text(TORCHRUN)
    root = str(Path(__file__).parents[2])
    command = ["torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(program)]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its workers, which are in sessions of their own
            process.communicate(timeout=60)
    assert process.returncode == 0, output
    want = "2 16 3.3125 Reductions(gradients=1, buckets=1, bytes=4)\n"
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [want, want]

"""The example trainer: killed at random moments, and on one device, eight, and two processes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRAINER = ROOT / "examples" / "train_gpt.py"

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("flax", "rich", "orbax")),
        reason="the trainer needs Flax, rich and Orbax",
    ),
    pytest.mark.timeout(1200),  # the machine may be busy with other tests
]

TINY = ["--layers", "1", "--width", "8", "--quiet"]

# The process is forked before JAX has started anything in it, so that each run is a process of
# its own, but need not import everything again.
KILLER = """
import os, random, runpy, shutil, signal, sys, time
from pathlib import Path

trainer, folder, kills, *options = sys.argv[1:]
folder = Path(folder)
sys.argv = [trainer]
main = runpy.run_path(trainer)["main"]
assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
random.seed(1)

def start(where):
    output = folder / "output"
    output.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = 70
        try:
            status = main(["--folder", str(where), *options])
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    limit = time.monotonic() + 200
    while "training from" not in (output.read_text() if output.exists() else ""):
        assert time.monotonic() < limit, "the trainer does not begin"
        if os.waitpid(pid, os.WNOHANG)[0]:
            sys.exit("the trainer ended early: " + output.read_text())
        time.sleep(0.01)
    return pid

def end(pid):
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, 143, -9):
        sys.exit((folder / "output").read_text())
    return status

def size(path):
    return path.stat().st_size if path.exists() else 0

def after_an_attempt(pid, where, before):
    limit = time.monotonic() + 200
    while size(where / "ids-0.jsonl") <= before:
        assert time.monotonic() < limit, "the trainer makes no attempt"
        time.sleep(0.002)

pid = start(folder / "whole")
after_an_attempt(pid, folder / "whole", 0)
began = time.monotonic()
assert end(pid) == 0
seconds = time.monotonic() - began

# One in five is killed before its first attempt; the others at a random moment behind it: in the
# next attempts, and in their saves.
killed = 0
for n in range(int(kills)):
    pid = start(folder / "cut")
    if n % 5:
        after_an_attempt(pid, folder / "cut", size(folder / "cut" / "ids-0.jsonl"))
    time.sleep(random.uniform(0, seconds / 40))
    os.kill(pid, signal.SIGKILL)
    killed += end(pid) == -9
pid = start(folder / "cut")
os.kill(pid, signal.SIGTERM)
terminated = end(pid)
shutil.copytree(folder / "cut", folder / "other")
pid = start(folder / "cut")
assert end(pid) == 0
changed = ["--microbatch-size", "1", "--microbatches", "4"]
options += changed
pid = start(folder / "other")
assert end(pid) == 0
print(f"killed {killed} terminated {terminated}")
"""


def read_record(folder):
    record = json.loads((folder / "record.json").read_text())
    del record["peaks"], record["times"]
    return record


def read_ids(folder):
    """Per process and group: the epoch, and the IDs of each replica."""
    return [
        [json.loads(line)["metrics"] for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("ids-*.jsonl"))
    ]


def test_a_trainer_killed_twenty_times_ends_as_if_it_had_not_been(run_python, tmp_path):
    options = ["--examples", "58", "--epochs", "4", "--microbatch-size", "2"]
    options += ["--microbatches", "2", "--log-every", "5", "--save-every", "1"]
    words = run_python(
        KILLER,
        str(TRAINER),
        str(tmp_path),
        "20",
        *options,
        *TINY,
        timeout=1100,
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    assert words.strip().endswith("killed 20 terminated 143")
    whole, cut, other = (tmp_path / name for name in ("whole", "cut", "other"))
    # The record holds the checksum of all parameters and optimizer state, and the ledger.
    assert read_record(cut) == read_record(whole)
    assert "sha256" in read_record(cut)["accepted"][0]
    assert (cut / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()
    assert (cut / "ids-0.jsonl").read_bytes() == (whole / "ids-0.jsonl").read_bytes()
    (ids,) = read_ids(cut)
    for epoch in range(4):
        names = [name for line in ids if line["epoch"] == epoch for name in line["ids"]["0"]]
        assert len(names) == len(set(names)) == 58
    # The last one went on in another partition: the same examples, and the record says so.
    (change,) = read_record(other)["plan_changes"]
    assert (change["before"]["microbatch_size"], change["after"]["microbatch_size"]) == (2, 1)
    assert 0 < change["examples"] < 58 * 4
    assert read_record(other)["counts"]["examples"] == 58 * 4
    assert read_record(whole)["plan_changes"] == []


def run_processes(folder, options, processes, port, devices=1):
    """Runs the trainer as so many processes, and ends what is left of them."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-W", "error", str(TRAINER), "--folder", str(folder), *options]
    command += ["--processes", str(processes), "--coordinator", f"localhost:{port}"]
    running = [
        subprocess.Popen(
            [*command, "--process", str(p)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for p in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=800)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * processes, outputs


def test_one_device_eight_and_two_processes_train_the_same_examples_in_each_update(
    tmp_path, free_port
):
    shared = ["--examples", "54", "--save-every", "3", "--log-every", "1", *TINY]
    ways = {
        "one": (["--microbatch-size", "4", "--microbatches", "4"], 1, 1),
        "eight": (["--microbatch-size", "1", "--microbatches", "2"], 1, 8),
        "two processes": (["--microbatch-size", "2", "--microbatches", "4"], 2, 1),
    }
    updates, axes = {}, {}
    for name, (sizes, processes, devices) in ways.items():
        run_processes(tmp_path / name, [*shared, *sizes], processes, free_port, devices)
        groups = zip(*read_ids(tmp_path / name), strict=True)
        updates[name] = [
            sorted(i for part in parts for ids in part["ids"].values() for i in ids)
            for parts in groups
        ]
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        axes[name] = [json.loads(line)["axes"] for line in lines]
    assert [len(update) for update in updates["one"]] == [16, 16, 16, 6]
    assert updates["eight"] == updates["two processes"] == updates["one"]
    assert axes["eight"] == axes["two processes"] == axes["one"]
    records = {name: read_record(tmp_path / name) for name in ways}
    assert [records[name]["plan"]["replicas"] for name in ways] == [1, 8, 2]
    assert [records[name]["processes"] for name in ways] == [1, 1, 2]

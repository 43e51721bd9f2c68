"""Memory of known size is found, in the group that holds it."""

import json
import time

import pytest
import torch

from torch_ref import memory
from torch_ref.memory import Usage, measure

MIB = 2**20


def run_group_with_state():
    """Needs 64 MiB for a moment; the first call keeps 32 MiB, as an optimizer's state."""
    kept = []

    def run_group() -> None:
        if not kept:
            kept.append(torch.ones(32 * MIB, dtype=torch.uint8))
        moment = torch.ones(64 * MIB, dtype=torch.uint8)
        moment += 1
        time.sleep(0.05)  # long enough for a sample

    return run_group


@pytest.mark.parametrize("source", ["peak counter", "samples"])
def test_a_moment_of_64_mib_and_a_state_of_32_are_found_where_they_belong(
    monkeypatch, tmp_path, source
) -> None:
    if source == "samples":
        monkeypatch.setattr(memory, "CLEAR_PEAK", tmp_path)  # a folder cannot be written to
    elif not memory._reset_peak():
        pytest.skip("this kernel does not reset its peak counter")
    usage = measure(run_group_with_state(), groups=4)
    first, later = usage.first["cpu"], usage.later["cpu"]
    assert first.source == later.source == source
    assert first.above_baseline == pytest.approx(96 * MIB, abs=8 * MIB)
    assert later.above_baseline == pytest.approx(64 * MIB, abs=8 * MIB)
    assert later.baseline - first.baseline == pytest.approx(32 * MIB, abs=8 * MIB)


def test_memory_that_the_c_library_kept_from_the_group_before_is_needed_again() -> None:
    last_ones = []

    def run_group() -> None:
        small = [torch.ones(100 * 1024, dtype=torch.uint8) for _ in range(640)]
        last_ones.append(small[-1])  # so that the heap cannot shrink from its end

    usage = measure(run_group)
    assert usage.later["cpu"].above_baseline > 50 * MIB


ACCUMULATION = """
import json, torch
from torch_ref.losses import Weighted
from torch_ref.memory import measure
from torch_ref.train import update

torch.set_num_threads(1)
layers = [torch.nn.Linear(256, 256) for _ in range(8)]
model = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.GELU())])
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.ones(4096, 256)

def loss_fn(model, x):
    return Weighted(model(x).square().sum(), torch.tensor(len(x)))

found = {}
for name, size in [("accumulated", 256), ("undivided", 4096)]:
    usage = measure(lambda: update(model, optimizer, loss_fn, batch.split(size)), groups=2)
    found[name] = usage.later["cpu"].above_baseline
print(json.dumps(found))
"""


def test_sixteen_microbatches_need_far_less_than_the_undivided_batch(run_python) -> None:
    found = json.loads(run_python(ACCUMULATION).splitlines()[-1])
    # 16 activations of 4 MiB are alive in the undivided backward pass, 16 of 0.25 in the other,
    # beside 2 MiB of gradients in both.
    assert found["undivided"] > 60 * MIB
    assert found["accumulated"] < found["undivided"] / 4


def test_every_device_is_reported_with_its_own_counters(monkeypatch) -> None:
    """Two devices that are not there: what is asked of CUDA, and where the answers go."""
    log: list[tuple[str, int]] = []
    in_use, peaks = {0: [10, 30], 1: [5, 6]}, {0: [50, 40], 1: [9, 8]}

    def answer(name, values=None):
        def call(device):
            log.append((name, device))
            return values[device].pop(0) if values else None

        return call

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", answer("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", answer("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", answer("in use", in_use))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", answer("peak", peaks))
    usage = measure(lambda: log.append(("group", -1)), groups=2)
    assert usage.first["cuda:0"] == Usage(10, 50, "allocator")
    assert usage.later["cuda:0"] == Usage(30, 40, "allocator")
    assert usage.first["cuda:1"] == Usage(5, 9, "allocator")
    assert usage.later["cuda:1"] == Usage(6, 8, "allocator")
    assert log.index(("reset", 1)) < log.index(("group", -1)) < log.index(("peak", 0))
    assert ("wait", 1) in log[log.index(("group", -1)) : log.index(("peak", 0))]


def test_one_group_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="groups must be at least 2"):
        measure(lambda: None, groups=1)


def test_where_there_is_no_proc_the_reason_is_said(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    with pytest.raises(OSError, match="on Linux only"):
        measure(lambda: None)

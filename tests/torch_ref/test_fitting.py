"""Running out of memory in PyTorch: caught, shrunk, and replayed as if it had not been."""

import json
import sys

import pytest
import torch
from torch import nn

from torch_ref.fitting import Change, FittingUpdate, is_out_of_memory
from torch_ref.losses import Weighted
from torch_ref.train import Counts, update


class Noisy(nn.Module):
    """A layer, dropout, and a buffer that counts forward passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.passes += 1
        return self.dropout(self.layer(x))


def make(limit, error=None, at=1):
    """Model, optimizer and a loss that runs out of memory above `limit` examples, in pass `at`."""
    model = Noisy()
    seen = [0]

    def loss_fn(model, x):
        total = model(x).square().sum()
        seen[0] += 1
        if len(x) > limit and seen[0] >= at:
            raise error or torch.OutOfMemoryError("CUDA out of memory.")
        return Weighted(total, torch.tensor(len(x)))

    return model, torch.optim.AdamW(model.parameters(), lr=0.1), loss_fn


ROWS = torch.arange(24.0, dtype=torch.float64).reshape(8, 3)


def test_the_replay_is_bitwise_the_update_of_the_smaller_size():
    model, optimizer, loss_fn = make(2, at=2)  # the second microbatch of 4 fails, not the first
    fitting = FittingUpdate(model, optimizer, loss_fn, 4)
    counts = Counts()
    torch.manual_seed(5)
    attempts = [fitting(ROWS, counts=counts), fitting(ROWS, counts=counts)]
    fresh, fresh_optimizer, fresh_loss = make(8)
    fresh_counts = Counts()
    torch.manual_seed(5)
    for _ in range(2):
        update(fresh, fresh_optimizer, fresh_loss, ROWS.split(2), counts=fresh_counts)
    for (name, got), want in zip(
        model.state_dict().items(), fresh.state_dict().values(), strict=True
    ):
        assert torch.equal(got, want), name
    assert counts == fresh_counts
    assert counts.microbatches == 8
    assert fitting.changes == [Change(0, 4, 2)]
    assert attempts[0].group.weights == {"loss": 8}


def test_other_errors_are_passed_on():
    model, optimizer, loss_fn = make(2, RuntimeError("shapes cannot be multiplied"))
    fitting = FittingUpdate(model, optimizer, loss_fn, 8)
    with pytest.raises(RuntimeError, match="shapes"):
        fitting(ROWS)
    assert fitting.changes == []


@pytest.mark.parametrize(("tries", "message"), [(9, "8, 4, 2, 1, and 1 is"), (2, "8, 4, 2 tries")])
def test_giving_up_names_what_was_tried(tries, message):
    model, optimizer, loss_fn = make(0)
    with pytest.raises(MemoryError, match=message):
        FittingUpdate(model, optimizer, loss_fn, 8, max_tries=tries)(ROWS)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_running_out_in_the_optimizer_is_no_reason_for_a_smaller_microbatch(monkeypatch):
    model, optimizer, loss_fn = make(8)

    def step():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(optimizer, "step", step)
    fitting = FittingUpdate(model, optimizer, loss_fn, 8)
    with pytest.raises(MemoryError, match="in the optimizer's step"):
        fitting(ROWS)
    assert fitting.changes == []


@pytest.mark.parametrize("size", [3, 0])
def test_a_size_that_does_not_divide_the_examples_is_refused(size):
    with pytest.raises(ValueError, match=r"do not divide|at least 1"):
        FittingUpdate(*make(8), size)(ROWS)


LIMITED = """
import json, resource, torch
from torch_ref.fitting import FittingUpdate, is_out_of_memory
from torch_ref.losses import Weighted
from torch_ref.train import update

torch.set_num_threads(1)
def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def loss_fn(model, x):
    return Weighted(torch.tanh(model(x)).square().sum(), torch.tensor(len(x)))

rows = torch.ones(8, 65536, 64)  # 16 MiB an example, several times over in a pass
model, optimizer = make()
update(model, optimizer, loss_fn, rows[:1].split(1))  # what a first pass allocates for good
model, optimizer = make()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, hard))
fitting = FittingUpdate(model, optimizer, loss_fn, 8)
fitting(rows)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
fresh, fresh_optimizer = make()
update(fresh, fresh_optimizer, loss_fn, rows.split(fitting.microbatch_size))
equal = torch.equal(model.weight, fresh.weight)
print(json.dumps({"size": fitting.microbatch_size, "equal": equal}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, as Linux does")
def test_memory_that_really_runs_out_is_recognised_and_survived(run_python):
    found = json.loads(run_python(LIMITED).splitlines()[-1])
    assert 1 <= found["size"] < 8
    assert found["equal"]


def test_the_cpu_allocators_words_are_recognised():
    said = "alloc_cpu.cpp:121: DefaultCPUAllocator: can't allocate memory"
    assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(ValueError("not enough memory"))

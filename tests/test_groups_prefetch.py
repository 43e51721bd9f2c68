"""prefetch: the same groups, on devices, a bounded number ahead; and streams of other libraries."""

import threading
import time

import jax
import numpy as np
import pytest

import jax_accum as ja
from jax_accum import _prefetch

PLAN = ja.BatchPlan(microbatch_size=2, microbatches=2)


def batches(n):
    return ({"x": np.arange(i, i + 1)} for i in range(n))


def waiting_threads():
    return [t for t in threading.enumerate() if t.name == "jax_accum.prefetch"]


def until(test, seconds=20):
    limit = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < limit, "did not happen in time"
        time.sleep(0.005)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_groups_are_the_same_and_their_batches_are_on_the_device(size):
    plain = list(ja.groups(batches(11), PLAN))
    ahead = list(ja.prefetch(ja.groups(batches(11), PLAN), size))
    assert [group.ids for group in ahead] == [group.ids for group in plain]
    for got, want in zip(ahead, plain, strict=True):
        assert isinstance(got.batch["x"], jax.Array)
        assert got.batch["x"].tolist() == want.batch["x"].tolist()
        assert got.replica_ids == want.replica_ids


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_than_so_many_groups_wait(size):
    made = []

    def counted():
        for group in ja.groups(batches(40), PLAN):
            made.append(group.position)
            yield group

    stream = ja.prefetch(counted(), size)
    assert made == []
    next(stream)
    until(lambda: len(made) >= 1 + size)
    time.sleep(0.1)  # it would read on here
    assert len(made) == 1 + size
    next(stream)
    until(lambda: len(made) == 2 + size)
    stream.close()
    assert not waiting_threads()


def test_with_a_group_in_hand_the_consumer_goes_first(monkeypatch):
    monkeypatch.setattr(_prefetch, "HEAD_START", 0.4)
    made = []

    def counted():
        for group in ja.groups(batches(40), PLAN):
            made.append(time.monotonic())
            yield group

    stream = ja.prefetch(counted(), 2)
    next(stream)
    until(lambda: len(made) == 3)
    asked = time.monotonic()
    next(stream)
    until(lambda: len(made) == 4)
    assert made[3] - asked >= 0.4  # in which the consumer dispatches its step
    stream.close()


def test_with_none_in_hand_nobody_waits(monkeypatch):
    monkeypatch.setattr(_prefetch, "HEAD_START", 20)
    start = time.monotonic()
    stream = ja.prefetch(ja.groups(batches(40), PLAN), 1)
    assert [next(stream).position for _ in range(3)] == [4, 8, 12]
    assert time.monotonic() - start < 15
    stream.close()


def test_what_the_stream_raises_comes_after_the_groups_before_it():
    def broken():
        yield from batches(4)
        raise OSError("the disk went away")

    stream = ja.prefetch(ja.groups(broken(), PLAN))
    assert next(stream).examples == 4
    with pytest.raises(OSError, match="the disk went away"):
        next(stream)
    assert not waiting_threads()


def test_examples_left_out_are_still_reported():
    made = ja.groups(batches(7), PLAN, "drop")
    assert len(list(ja.prefetch(made))) == 1
    assert made.dropped == ja.Dropped(3, (4, 5, 6))


def test_a_size_below_one_is_refused():
    with pytest.raises(ValueError, match="size must be at least 1"):
        ja.prefetch([], 0)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
import jax_accum as ja

def loss_fn(w, batch):
    error = jnp.where(batch["mask"], w - batch["x"], 0)
    return ja.Weighted(jnp.sum(error**2), jnp.sum(batch["mask"]))

# Powers of two and few of them: every order of summation gives the same bits.
data = np.arange(26, dtype=np.float32)
results = []
for m, a, d in [(2, 4, 1), (2, 2, 2), (1, 2, 4)]:
    mesh = jax.make_mesh((d,), ("data",), axis_types=(jax.sharding.AxisType.Auto,),
                         devices=jax.devices()[:d])
    plan = ja.BatchPlan.from_mesh(mesh, microbatch_size=m, microbatches=a)
    tx = ja.guard(optax.sgd(0.5))
    step = ja.make_train_step(loss_fn, tx, None, mesh=mesh)
    w = jnp.zeros(())
    state = tx.init(w)
    ledger = ja.Ledger()
    seen = []
    for group in ja.prefetch(ja.groups([{"x": data}], plan), mesh=mesh):
        assert len(group.batch["x"].sharding.device_set) == d
        w, state, metrics = step(w, state, group.batch, examples=group.examples)
        ledger.attempt(group, metrics)
        seen.append(float(w))
    ledger.check(state)
    results.append(seen)
    print(seen, ledger.totals.microbatches)
assert results[0] == results[1] == results[2]
"""


def test_replicas_train_the_same_updates_from_sharded_batches(run_python):
    lines = run_python(PROGRAM, devices=4).strip().split("\n")
    # With learning rate 1/2 an update sets w to the mean of its examples.
    assert [line.rpartition(" ")[0] for line in lines] == ["[3.5, 11.5, 19.5, 24.5]"] * 3
    assert [int(line.rpartition(" ")[2]) for line in lines] == [13, 13, 26]


def test_a_pytorch_dataloader_is_a_stream():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(7).reshape(7, 1), torch.arange(7))
    loader = torch.utils.data.DataLoader(data, batch_size=3)
    made = list(ja.groups(loader, PLAN, padding={"1": -100}))
    assert [group.batch[1].tolist() for group in made] == [[[0, 1], [2, 3]], [[4, 5], [6, -100]]]
    assert [group.weight for group in made] == [4, 3]

"""The ledger: what a run came to, losses over several groups, and the writers."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja


def loss_fn(w, batch):
    error = jnp.where(batch["mask"], w - batch["x"], 0)
    return ja.Weighted(jnp.sum(error**2), jnp.sum(batch["mask"]))


def stream(values, masks=None):
    x = np.array(values, np.float32)
    return [{"x": x} if masks is None else {"x": x, "mask": np.array(masks, bool)}]


def train(batches, plan, ledger, *, last="keep", tx=None, log_every=None):
    tx = ja.guard(optax.sgd(0.5)) if tx is None else tx
    step = ja.make_train_step(loss_fn, tx, None)
    w = jnp.zeros(())
    state = tx.init(w)
    made = ja.groups(batches, plan, last)
    ws = []
    for n, group in enumerate(made, 1):
        w, state, metrics = step(w, state, group.batch, examples=group.examples)
        ledger.attempt(group, metrics)
        ws.append(float(w))
        if log_every and n % log_every == 0:
            ledger.log()
    ledger.drop(made.dropped)
    return ws, state


class Memory:
    def __init__(self):
        self.rows = []

    def log(self, metrics, axes):
        self.rows.append((dict(metrics), dict(axes)))


def test_a_stream_that_ends_early_is_divided_by_what_it_has():
    # Learning rate 1/2 and a squared error: an update sets w to the mean of its examples.
    ledger = ja.Ledger()
    ws, state = train(
        stream([1, 2, 3, 4, 5, 6]), ja.BatchPlan(microbatch_size=1, microbatches=4), ledger
    )
    assert ws == [2.5, 5.5]
    ledger.check(state)
    assert ledger.axes == {"updates": 2, "examples": 6, "tokens": 6}


def test_three_microbatches_of_four_make_one_update_or_are_reported():
    plan = ja.BatchPlan(microbatch_size=1, microbatches=4)
    kept, dropped = ja.Ledger(), ja.Ledger()
    ws, _ = train(stream([1, 2, 6]), plan, kept)
    assert ws == [3.0]
    assert (kept.totals.updates, kept.totals.examples, kept.totals.microbatches) == (1, 3, 3)
    ws, _ = train(stream([1, 2, 6]), plan, dropped, last="drop")
    assert ws == []
    assert (dropped.totals.attempts, dropped.totals.examples_dropped) == (0, 3)


def test_skips_are_counted_by_their_cause_as_the_optimizer_counts_them():
    values = [1, 2, np.inf, 4, 5, 6, 7, 8]
    masks = [1, 1, 1, 1, 0, 0, 1, 0]
    ledger, memory = ja.Ledger(), Memory()
    ledger = ja.Ledger([memory])
    _, state = train(stream(values, masks), ja.BatchPlan(microbatch_size=1, microbatches=2), ledger)
    totals = ledger.totals
    assert (totals.attempts, totals.updates) == (4, 2)
    assert (totals.skipped_nonfinite, totals.skipped_empty) == (1, 1)
    assert (totals.tokens, totals.tokens_ignored, totals.examples) == (5, 3, 8)
    ledger.check(state)
    ledger.log()
    # The group with an inf is in neither sum nor weight: (1 + 4 + (7 - 1.5)^2) / 3.
    assert memory.rows[0][0]["loss"] == pytest.approx((1 + 4 + 5.5**2) / 3, rel=1e-6)
    assert memory.rows[0][0]["grad_norm"] == pytest.approx(11.0)


def test_the_loss_of_several_groups_is_their_sum_over_their_weight():
    # Two tokens at loss 2 and six at loss 4: 3.5, and not 3.
    group = next(ja.groups([{"x": np.ones(1)}], ja.BatchPlan(microbatch_size=1, microbatches=1)))
    ledger = ja.Ledger()
    for total, weight in [(512 * 2.0, 512), (1536 * 4.0, 1536)]:
        ledger.attempt(group, metrics_of({"loss": total}, {"loss": weight}))
    assert ledger.log()["loss"] == 3.5
    assert "loss" not in ledger.log()


def metrics_of(terms, weights, updated=True):
    return {"terms": terms, "weights": weights, "updated": updated, "grad_norm": 1.0}


def test_each_term_has_its_own_denominator_and_coefficient():
    group = next(ja.groups([{"x": np.ones(1)}], ja.BatchPlan(microbatch_size=1, microbatches=1)))
    ledger = ja.Ledger(coefficients={"router": 0.5})
    ledger.attempt(group, metrics_of({"text": 8.0, "router": 6.0}, {"text": 4, "router": 2}))
    ledger.attempt(group, metrics_of({"text": 4.0, "router": np.nan}, {"text": 2, "router": 0}))
    assert ledger.log() == {
        "loss": 2.0 + 0.5 * 3.0,
        "loss/text": 2.0,
        "loss/router": 3.0,
        "grad_norm": 1.0,
    }


def test_the_gradient_norm_is_that_before_clipping():
    memory = Memory()
    tx = ja.guard(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)))
    plan = ja.BatchPlan(microbatch_size=1, microbatches=2)
    ws, _ = train(stream([1.0, 3.0]), plan, ja.Ledger([memory]), tx=tx, log_every=1)
    assert ws == [pytest.approx(0.05)]
    assert memory.rows[0][0]["grad_norm"] == 4.0


def test_three_billion_tokens_are_three_billion():
    big = ja.Group({}, (), 10**9, 3 * 10**9, 0, 1, 0, 0, range(1), np.zeros((1, 1, 1)))
    ledger = ja.Ledger()
    ledger.attempt(big, metrics_of({"loss": 1.0}, {"loss": 1.0}))
    ledger.attempt(big, metrics_of({"loss": 1.0}, {"loss": 1.0}))
    assert ledger.axes == {"updates": 2, "examples": 2 * 10**9, "tokens": 6 * 10**9}


def test_a_ledger_goes_on_from_its_state_as_if_not_stopped():
    plan = ja.BatchPlan(microbatch_size=1, microbatches=2)
    whole, halves = ja.Ledger(), ja.Ledger()
    train(stream([1, 2, 3, 4, 5]), plan, whole)
    train(stream([1, 2, 3, 4, 5]), plan, halves)
    later = ja.Ledger()
    later.restore(json.loads(json.dumps(halves.state())))
    assert later.state() == whole.state()
    assert later.log() == whole.log()
    with pytest.raises(ValueError, match="state is not that of a Ledger"):
        later.restore({"totals": {"steps": 3}})


def test_a_ledger_that_disagrees_with_the_optimizer_says_where():
    plan = ja.BatchPlan(microbatch_size=1, microbatches=2)
    ledger = ja.Ledger()
    _, state = train(stream([1, 2, 3]), plan, ledger)
    ledger.restore({**ledger.state(), "totals": {**ledger.state()["totals"], "examples": 4}})
    with pytest.raises(ValueError, match="disagree: examples: 4 and 3"):
        ledger.check(state)


def test_metrics_that_lack_something_are_refused():
    with pytest.raises(ValueError, match=r"metrics lacks \['weights', 'grad_norm'\]"):
        ja.Ledger().attempt(None, {"terms": {}, "updated": True})


def test_no_axis_and_no_counter_is_called_step():
    ledger = ja.Ledger()
    names = [*ledger.axes, *vars(ledger.totals)]
    assert not [name for name in names if "step" in name]


def test_lines_behind_the_last_save_are_written_again(tmp_path):
    path = tmp_path / "log.jsonl"
    writer = ja.writers.JsonLines(path)
    for n in range(1, 5):
        writer.log({"loss": float(n)}, {"updates": n})
    whole = path.read_text()
    with path.open("a") as file:
        file.write('{"axes": {"updates": 5}, "metr')  # cut short by a kill
    writer = ja.writers.JsonLines(path, after={"updates": 2})
    lines = path.read_text().splitlines()
    assert [json.loads(line)["axes"]["updates"] for line in lines] == [1, 2]
    for n in (3, 4):
        writer.log({"loss": float(n)}, {"updates": n})
    assert path.read_text() == whole
    path.write_text("loss 3\n")
    with pytest.raises(ValueError, match=r"log.jsonl:1 is not a line of this log"):
        ja.writers.JsonLines(path, after={"updates": 2})


def test_json_lines_hold_what_is_not_a_number(tmp_path):
    path = tmp_path / "log.jsonl"
    ja.writers.JsonLines(path).log({"loss": np.float32("nan"), "x": 2}, {"updates": 1})
    assert json.loads(path.read_text())["metrics"] == {"loss": "nan", "x": 2}


def test_tensorboard_names_the_axis_in_the_tag():
    class Summary:
        def __init__(self):
            self.rows = []

        def add_scalar(self, tag, value, global_step):
            self.rows.append((tag, value, global_step))

    summary = Summary()
    writer = ja.writers.TensorBoard("", axes=("updates", "tokens"), summary_writer=summary)
    writer.log({"loss": 2.0}, {"updates": 3, "tokens": 70})
    assert summary.rows == [("loss/by_updates", 2.0, 3), ("loss/by_tokens", 2.0, 70)]
    with pytest.raises(ValueError, match=r"axes lacks \['tokens'\]"):
        writer.log({"loss": 2.0}, {"updates": 3})


def test_tensorboard_finds_in_the_file_what_was_logged(tmp_path):
    pytest.importorskip("tensorboardX", reason="the extra tensorboard")
    from tensorboardX.proto.event_pb2 import Event

    writer = ja.writers.TensorBoard(tmp_path, axes=("updates", "tokens"))
    for updates, loss in ((1, 2.5), (2, 0.5)):
        writer.log({"loss": loss}, {"updates": updates, "tokens": 100 * updates})
    writer.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    data, found = path.read_bytes(), []
    while data:  # records: length, its checksum, an event, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
        data = data[16 + length :]
    assert sorted(found) == [
        ("loss/by_tokens", 100, 2.5),
        ("loss/by_tokens", 200, 0.5),
        ("loss/by_updates", 1, 2.5),
        ("loss/by_updates", 2, 0.5),
    ]


def test_the_plan_may_change_between_groups_and_nothing_is_lost_or_twice():
    data = stream(range(24))
    first = next(ja.groups(data, ja.BatchPlan(microbatch_size=1, microbatches=8)))
    rest = list(
        ja.groups(data, ja.BatchPlan(microbatch_size=1, microbatches=2), skip=first.position)
    )
    assert [group.examples for group in rest] == [2] * 8
    ja.audit_ids([first, *rest], expected=range(24), strict=True)

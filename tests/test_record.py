"""RunRecord: what it holds, its schema, files that are damaged, and two of them compared."""

import errno
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_accum as ja

PLAN = ja.BatchPlan(microbatch_size=2, microbatches=4, replicas=2)


def record(**changes):
    given = {
        "plan": PLAN,
        "normalisation": {"loss": "supervised tokens"},
        "optimizer": "adamw(1e-3)",
        "data": "numbers in order",
        "seed": 0,
    }
    return ja.RunRecord(**{**given, **changes})


def counts(**changes):
    return {**record().counts, **changes}


def full_record():
    mesh = jax.sharding.AbstractMesh((2, 3), ("data", "model"))
    made = record(
        mesh=jax.sharding.AbstractMesh((2,), ("data",)),
        precision={"params": jnp.float32, "compute": jnp.bfloat16},
        preparation=["one update to compile"],
        trials=[{"what": "m = 8", "outcome": "out of memory"}],
        accepted=["m = 2"],
    )
    stream = ja.groups([{"x": np.arange(19)}], PLAN, "keep")
    ledger = ja.Ledger()
    metrics = {"terms": {"loss": 1.0}, "weights": {"loss": 1}, "updated": True, "grad_norm": 1.0}
    for group in stream:
        ledger.attempt(group, metrics)
        made.attempt(group)
    for attempts, scale in enumerate([8.0, 8.0, 4.0]):
        made.note_loss_scale(attempts, scale)
    made.drop(ja.Dropped(3, ("a", 1, ("b", "c"))))
    made.change_plan(PLAN.with_microbatch_size(1), 19, mesh=mesh)
    made.finish(ledger)
    return made


def test_a_record_says_what_the_run_did():
    data = full_record().as_dict()
    assert data["plan"] == {
        "microbatch_size": 1,
        "microbatches": 8,
        "replicas": 2,
        "examples_per_update": 16,
    }
    assert data["mesh"] == {"axes": {"data": 2, "model": 3}, "data_axes": ["data"]}
    assert data["precision"] == {
        "params": "float32",
        "compute": "bfloat16",
        "accumulator": "float32",
    }
    assert data["last_group"] == {
        "policy": "keep",
        "partial_groups": 1,
        "dropped_ids": ["a", 1, "('b', 'c')"],
    }
    assert (data["counts"]["attempts"], data["counts"]["examples"]) == (2, 19)
    assert data["loss_scale"] == [
        {"attempts": 0, "scale": 8.0},
        {"attempts": 2, "scale": 4.0},
    ]
    assert [change["examples"] for change in data["plan_changes"]] == [19]
    assert data["environment"]["versions"]["jax"] == jax.__version__
    (peak,) = data["peaks"]
    assert peak["peak_bytes"] >= peak["baseline_bytes"] > 10**6
    assert peak["how"] == "resident memory of the process"
    assert data["times"]["seconds"] >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the counter of getrusage is read")
def test_the_memory_of_whoever_started_the_process_is_not_its_own(run_python):
    program = (
        "import subprocess, sys\n"
        "held = bytearray(2**30)\n"
        "held[::4096] = bytes(len(held[::4096]))\n"
        "child = 'from jax_accum._peaks import process_memory; print(process_memory().peak)'\n"
        "print(subprocess.check_output([sys.executable, '-c', child], text=True))\n"
    )
    assert 10**7 < int(run_python(program)) < 2**30


def test_a_record_is_the_same_after_a_file(tmp_path):
    made = full_record()
    path = tmp_path / "record.json"
    made.save(path)
    again = ja.RunRecord.load(path)
    assert again.as_dict() == made.as_dict()
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_a_person_reads_a_table():
    table = full_record().describe()
    assert "| plan.examples_per_update | 16 |" in table
    assert "| loss_scale | attempts 0, scale 8.0; attempts 2, scale 4.0 |" in table
    assert "| trials | what m = 8, outcome out of memory |" in table


def planted(path, value):
    data = full_record().as_dict()
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("plan.microbatches", 0, "plan.microbatches must be an integer of at least 1, got 0"),
        ("plan.examples_per_update", 17, "plan.examples_per_update is 17, but 1 × 8 × 2 = 16"),
        ("counts.updates", 1, "counts: 2 attempts, but updates and skips make 1"),
        ("counts.tokens", float("nan"), "counts.tokens must be a finite number"),
        ("counts.tokens", -1, "counts.tokens must be a finite number of at least 0"),
        ("counts.step", 3, "counts.step is no field of this schema"),
        ("seed", True, "seed must be an integer"),
        ("schedule_unit", "steps", "schedule_unit must be one of updates, attempts"),
        ("mesh.data_axes", ["fsdp"], "data_axes names \\['fsdp'\\], which are no axes"),
        ("peaks", [{"device": "gpu"}], "peaks\\[0\\].baseline_bytes is missing"),
        ("loss_scale", {}, "loss_scale must be a list"),
        ("normalisation", None, "normalisation is missing"),
    ],
    ids=[
        "no microbatches",
        "examples per update that are no product",
        "updates and skips that are not the attempts",
        "tokens that are no number",
        "negative tokens",
        "a counter of steps",
        "a truth value as seed",
        "an unknown unit",
        "data axes that the mesh lacks",
        "a peak without its baseline",
        "a history that is no list",
        "a missing field",
    ],
)
def test_the_validator_names_the_field(path, value, message):
    with pytest.raises(ValueError, match=message):
        ja.RunRecord.from_dict(planted(path, value))


def test_the_validator_names_all_that_is_wrong():
    data = planted("seed", -1)
    data["optimizer"] = 3
    with pytest.raises(ValueError, match=r"optimizer must be text(?s:.)*seed must be"):
        ja.RunRecord.from_dict(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe\x00", "record.json"),
        (b"[1]", "a run record is a JSON object, got list"),
        (b'{"schema_version": 2}', "schema_version is 2, and this jax-accum reads up to 1"),
        (b'{"schema_version": "1"}', "schema_version must be an integer"),
        (b'{"schema_version": 1}', "plan is missing"),
        (b"[" * 100_000, "record.json"),
    ],
    ids=["empty", "cut short", "no text", "a list", "newer", "text as version", "bare", "deep"],
)
def test_a_file_that_is_no_record_is_refused_with_its_path(tmp_path, text, message):
    path = tmp_path / "record.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        ja.RunRecord.load(path)
    assert str(path) in str(caught.value)


def test_a_full_disk_leaves_the_older_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    record().save(path)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="could not be written \\(No space left") as caught:
        record(seed=7).save(path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_a_record_that_is_not_valid_is_not_written(tmp_path):
    made = record()
    made.counts["updates"] = 3
    with pytest.raises(ValueError, match="0 attempts, but updates and skips make 3"):
        made.save(tmp_path / "record.json")
    assert not list(tmp_path.iterdir())


def test_equal_runs_have_no_difference():
    assert full_record().diff(full_record()) == []


@pytest.mark.parametrize(
    ("changes", "field", "curves"),
    [
        ({"plan": PLAN.with_microbatch_size(8)}, "plan.microbatch_size", False),
        (
            {"plan": ja.BatchPlan(microbatch_size=2, microbatches=8, replicas=2)},
            "plan.examples_per_update",
            True,
        ),
        ({"normalisation": {"loss": "microbatches"}}, "normalisation", True),
        ({"precision": {"compute": "bfloat16"}}, "precision.compute", True),
        ({"precision": {"accumulator": "bfloat16"}}, "precision.accumulator", True),
        ({"schedule_unit": "microbatches"}, "schedule_unit", True),
        ({"last": "drop"}, "last_group.policy", True),
        ({"optimizer": "adamw(1e-4)"}, "optimizer", True),
        ({"data": "shuffled"}, "data", True),
        ({"seed": 1}, "seed", True),
        ({"loss_scale": [{"attempts": 0, "scale": 8.0}]}, "loss_scale", True),
        ({"counts": counts(examples_dropped=3)}, "counts.examples_dropped", True),
        ({"counts": counts(attempts=1, skipped_nonfinite=1)}, "counts.skipped_nonfinite", True),
        ({"counts": counts(tokens=9)}, "counts.tokens", True),
        ({"processes": 2}, "processes", False),
        ({"mesh": {"data": 2}}, "mesh", False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_difference_is_named_and_said_to_matter_or_not(changes, field, curves):
    found = record().diff(record(**changes))
    assert field in [difference.field for difference in found]
    assert [d.curves for d in found if d.field == field] == [curves]
    assert any(d.curves for d in found) == curves


def test_a_partition_that_changed_on_the_way_is_a_difference_if_updates_changed():
    other = record()
    other.change_plan(PLAN.with_microbatch_size(1), 32)
    other.plan = PLAN
    assert record().diff(other) == []
    other.change_plan(ja.BatchPlan(microbatch_size=2, microbatches=2), 64)
    other.plan = PLAN
    (found,) = record().diff(other)
    assert (found.field, found.b) == ("plan_changes", [(64, 16, 4)])


def test_the_axis_comes_first():
    other = record(
        plan=ja.BatchPlan(microbatch_size=1, microbatches=1), seed=3, normalisation={"loss": "rows"}
    )
    found = record().diff(other)
    assert found[0].field == "plan.examples_per_update"
    assert "Updates per example differ" in str(found[0])
    matters = [difference.curves for difference in found]
    assert matters == sorted(matters, reverse=True)


def test_a_run_that_went_on_is_comparable_as_far_as_the_other_went():
    short, long = record(), record()
    short.counts = counts(attempts=2, updates=2)
    long.counts = counts(attempts=9, updates=9)
    short.loss_scale = [{"attempts": 0, "scale": 8.0}]
    long.loss_scale = [*short.loss_scale, {"attempts": 5, "scale": 16.0}]
    assert short.diff(long) == []
    long.loss_scale[1]["attempts"] = 1
    assert [difference.field for difference in short.diff(long)] == ["loss_scale"]

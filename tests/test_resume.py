"""Checkpoints: mid-group, damaged, half-written, of another partition, on a full disk."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_accum as ja

pytest.importorskip("orbax.checkpoint")

PLAN = ja.BatchPlan(microbatch_size=2, microbatches=4)
OTHER = ja.BatchPlan(microbatch_size=4, microbatches=2)


def state_of(value):
    return {"w": jnp.full(3, value), "n": jnp.asarray(3, jnp.uint32), "none": (), "z": jnp.zeros(0)}


LIKE = state_of(0.0)


@pytest.fixture
def saved(tmp_path):
    checkpoints = ja.checkpoint.Checkpoints(tmp_path / "run")
    for number in (1, 2):
        checkpoints.save(number, state_of(float(number)), PLAN, facts={"position": 8 * number})
    return checkpoints


def folder(saved, number):
    return next(p for p in saved._folder.iterdir() if p.name.endswith(f"{number}"))


def test_the_newest_is_read_and_old_ones_go(saved):
    saved.save(3, state_of(3.0), PLAN)
    assert saved.numbers() == [2, 3]
    found = saved.restore(LIKE, PLAN)
    assert (found.number, found.facts, found.plan_before) == (3, {}, None)
    assert jax.tree.structure(found.state) == jax.tree.structure(LIKE)
    for got, want in zip(jax.tree.leaves(found.state), jax.tree.leaves(state_of(3.0)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_an_empty_folder_has_none(tmp_path):
    assert ja.checkpoint.Checkpoints(tmp_path / "none").restore(LIKE, PLAN) is None


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit in an array": lambda p: flip(
        max((f for f in p.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    ),
    "a flipped bit in the facts": lambda p: flip(p / "facts.json"),
    "facts cut short": lambda p: (p / "facts.json").write_text("{"),
    "a file gone": lambda p: next(f for f in (p / "state").rglob("*") if f.is_file()).unlink(),
    "a file too many": lambda p: (p / "state" / "more").write_text("x"),
    "no checksums": lambda p: (p / "checksums.json").unlink(),
    "checksums that are no object": lambda p: (p / "checksums.json").write_text("[]"),
    "no arrays": lambda p: shutil.rmtree(p / "state"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_is_found_and_the_one_before_used(saved, damage, caplog):
    damage(folder(saved, 2))
    found = saved.restore(LIKE, PLAN)
    assert (found.number, found.state["w"].tolist()) == (1, [1.0] * 3)
    assert found.facts == {"position": 8}
    assert "checkpoint 2 is damaged" in caplog.text


def test_when_all_are_damaged_nothing_is_pretended(saved):
    for number in (1, 2):
        flip(folder(saved, number) / "facts.json")
    with pytest.raises(ValueError, match=r"all checkpoints in .* are damaged \(1, 2\)"):
        saved.restore(LIKE, PLAN)


def test_a_half_written_one_is_none_and_goes_with_the_next_save(saved):
    whole = folder(saved, 2)
    half = whole.with_name("000000000003.partial-save")
    shutil.copytree(whole, half)
    (half / "checksums.json").unlink()
    assert saved.restore(LIKE, PLAN).number == 2
    saved.save(3, state_of(3.0), PLAN)
    assert not half.exists()
    assert saved.restore(LIKE, PLAN).number == 3


def test_another_partition_is_refused_in_mid_group_and_told_at_its_boundary(saved):
    found = saved.restore(LIKE, OTHER)
    assert (found.number, found.plan_before) == (2, PLAN)
    saved.save(3, state_of(3.0), PLAN, open_microbatches=3)
    with pytest.raises(ValueError, match="3 microbatches in an open group of m=2, A=4, D=1"):
        saved.restore(LIKE, OTHER)
    assert saved.restore(LIKE, PLAN).number == 3


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({**LIKE, "w": jnp.zeros(4)}, r"leaf \['w'\] is \(\(3,\), 'float32'\) there and \(\(4,\)"),
        ({**LIKE, "w": jnp.zeros(3, jnp.int32)}, "'float32'.* there and .*'int32'"),
        ({**LIKE, "y": jnp.zeros(2)}, "missing"),
    ],
    ids=["another shape", "another dtype", "a leaf more"],
)
def test_another_tree_is_named(saved, like, message):
    with pytest.raises(ValueError, match=message):
        saved.restore(like, PLAN)


def test_random_keys_are_kept_as_keys(tmp_path):
    checkpoints = ja.checkpoint.Checkpoints(tmp_path)
    key = jax.random.split(jax.random.key(5), 3)
    checkpoints.save(1, {"key": key}, PLAN)
    found = checkpoints.restore({"key": jax.random.split(jax.random.key(0), 3)}, PLAN)
    assert found.state["key"].dtype == key.dtype
    assert (jax.random.key_data(found.state["key"]) == jax.random.key_data(key)).all()


def test_shards_come_back_where_they_were(run_python, tmp_path):
    program = """
import sys
import jax, jax.numpy as jnp, jax_accum as ja
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
plan = ja.BatchPlan(microbatch_size=1, microbatches=1, replicas=4)
saved = ja.checkpoint.Checkpoints(sys.argv[1])
saved.save(1, [x], plan)
(found,) = saved.restore([jnp.zeros_like(x)], plan).state
assert found.sharding == x.sharding, found.sharding
assert (found == x).all()
"""
    run_python(program, str(tmp_path), devices=4)


def test_a_number_that_exists_is_refused(saved):
    with pytest.raises(ValueError, match="checkpoint 2 exists"):
        saved.save(2, LIKE, PLAN)


def test_facts_that_json_does_not_hold_are_refused_before_anything_is_written(saved):
    with pytest.raises(TypeError, match="not JSON serializable"):
        saved.save(3, LIKE, PLAN, facts={"x": object()})
    assert sorted(p.name for p in saved._folder.iterdir()) == ["000000000001", "000000000002"]


def test_one_checkpoint_is_too_few(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 2"):
        ja.checkpoint.Checkpoints(tmp_path, keep=1)


def test_a_full_disk_leaves_those_before(run_python, tmp_path):
    program = """
import resource, signal, sys
import jax.numpy as jnp, jax_accum as ja
plan = ja.BatchPlan(microbatch_size=1, microbatches=1)
saved = ja.checkpoint.Checkpoints(sys.argv[1])
saved.save(1, {"w": jnp.ones(2)}, plan)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # no file may be larger
noise = jnp.sin(jnp.arange(100_000.0) ** 2)  # does not compress
try:
    saved.save(2, {"w": noise}, plan)
except OSError as error:
    print("OSError", error.strerror)
print(saved.numbers(), sorted(p.name for p in saved._folder.iterdir()))
found = saved.restore({"w": jnp.zeros(2)}, plan)
print(found.number, found.state["w"].tolist())
"""
    lines = run_python(program, str(tmp_path)).strip().split("\n")
    (told,) = [line for line in lines if line.startswith("OSError")]
    assert told.startswith("OSError checkpoint 2 could not be written (")
    assert lines[-2:] == ["[1] ['000000000001']", "1 [1.0, 1.0]"]


MID_GROUP = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import jax_accum as ja

folder, first, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
plan = ja.BatchPlan(microbatch_size=2, microbatches=4)
tx = ja.guard(optax.adam(0.1), loss_scale=ja.DynamicLossScale(8.0, growth_interval=2))
opt = ja.MultiSteps(tx, plan.microbatches)

@jax.jit
def call(params, state, batch, key):
    scale = ja.loss_scale(state)
    def loss(params):
        noise = jax.random.normal(key, batch["x"].shape)
        error = jnp.where(batch["mask"], params @ batch["y"].T - batch["x"] - noise, 0)
        weight = jnp.sum(batch["mask"])
        return scale * jnp.sum(error**2) / jnp.maximum(weight, 1), weight
    (_, weight), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return opt.apply(grads, state, params, weight=weight, examples=jnp.sum(batch["mask"]))

rng = np.random.default_rng(0)
data = {"x": rng.normal(size=21).astype(np.float32), "y": rng.normal(size=(21, 3))}
data["y"] = data["y"].astype(np.float32)
params = jnp.zeros(3)
state = (params, opt.init(params), jax.random.key(7))
saved = ja.checkpoint.Checkpoints(folder)
done = 0
if first:
    found = saved.restore(state, plan)
    state, done = found.state, found.number
    assert done == first, done
# Whole groups before the one that was open are passed over; in it, the microbatches done.
position = done // plan.microbatches * plan.examples_per_update
for group in ja.groups([data], plan, skip=position):
    for a in range(done % plan.microbatches, plan.microbatches):
        params, opt_state, key = state
        key, own = jax.random.split(key)
        state = (*call(params, opt_state, group.microbatch(a), own), key)
        done += 1
        if done == stop:
            open_microbatches = int(state[1].mini_step)
            saved.save(done, state, plan, open_microbatches=open_microbatches)
            try:
                saved.restore(state, plan.with_microbatch_size(1))
            except ValueError as error:
                print("open", open_microbatches)
            raise SystemExit
leaves = [jax.random.key_data(x) if x is state[2] else x for x in jax.tree.leaves(state)]
print([np.asarray(x).tobytes().hex() for x in leaves], ja.counts(state[1]))
"""


@pytest.mark.parametrize("stop", [3, 6], ids=["in the first group", "in the second"])
def test_a_new_process_goes_on_in_mid_group_bit_for_bit(run_python, tmp_path, stop, whole_run):
    told = run_python(MID_GROUP, str(tmp_path), "0", str(stop))
    assert told.strip() == f"open {stop % 4}"
    assert run_python(MID_GROUP, str(tmp_path), str(stop), "0") == whole_run


_WHOLE = []


@pytest.fixture
def whole_run(run_python, tmp_path):
    if not _WHOLE:
        _WHOLE.append(run_python(MID_GROUP, str(tmp_path / "whole"), "0", "0"))
    assert "'updates': 3" in _WHOLE[0]
    assert "'examples': 21" in _WHOLE[0]
    return _WHOLE[0]

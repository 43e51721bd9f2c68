"""A step that runs out of memory takes a smaller microbatch and repeats the same group."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja
from jax_accum.memory import DoesNotFitError, fitting_step, regroup

PLAN = ja.BatchPlan(microbatch_size=8, microbatches=1)
TX = ja.guard(optax.adam(0.1))


def loss_fn(w, batch, key):
    """Random, so that another cut into microbatches is another loss."""
    noise = jax.random.normal(key, batch["x"].shape)
    return ja.Weighted(jnp.sum(batch["n"] * (w - batch["x"] - noise) ** 2), jnp.sum(batch["n"]))


def real_step(plan):
    return ja.make_train_step(loss_fn, TX, plan.microbatches)


STEPS: dict[int, object] = {}


def shared_step(plan):
    """One compilation for all tests of this file."""
    return STEPS.setdefault(plan.microbatches, real_step(plan))


def problem():
    w = jnp.zeros(())
    batch = {"x": jnp.arange(8.0), "n": jnp.array([3.0, 1, 4, 1, 5, 9, 2, 6])}
    return w, TX.init(w), batch


def running_out(at_least, *, lost=True, calls=None, after=0):
    """A `make` whose steps run out of memory from a size on, and lose what they were given."""
    done = [0]

    def make(plan):
        def step(params, opt_state, batch, **kwargs):
            if calls is not None:
                calls.append(plan.microbatch_size)
            done[0] += 1
            if plan.microbatch_size >= at_least and done[0] > after:
                if lost:
                    jax.tree.map(lambda x: x.delete(), (params, opt_state))
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9.")
            return shared_step(plan)(params, opt_state, batch, **kwargs)

        return step

    return make


def same(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    return all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


def started_with(m, keys):
    """Parameters and state of a run that had this size from the beginning."""
    w, state, batch = problem()
    for seed in keys:
        w, state, _ = shared_step(PLAN.with_microbatch_size(m))(
            w, state, batch, key=jax.random.key(seed)
        )
    return w, state


def test_the_update_is_that_of_a_run_that_began_with_the_smaller_size():
    calls = []
    step = fitting_step(running_out(4, calls=calls), PLAN)
    w, state, batch = problem()
    for seed in (3, 4):
        w, state, metrics = step(w, state, batch, key=jax.random.key(seed))
    assert calls == [8, 4, 2, 2]
    assert same((w, state), started_with(2, (3, 4)))
    assert not same(w, started_with(1, (3, 4))[0])  # the keys would tell
    assert ja.counts(state)["updates"] == ja.counts(state)["attempts"] == 2
    assert ja.counts(state)["microbatches"] == 8
    assert metrics["weights"]["loss"] == 31
    assert step.plan == ja.BatchPlan(microbatch_size=2, microbatches=4)
    assert [(n, b.microbatch_size, a.microbatch_size) for n, b, a in step.changes] == [
        (0, 8, 4),
        (0, 4, 2),
    ]


def test_only_what_was_lost_is_put_back():
    given = problem()
    seen = []

    def make(plan):
        def step(params, opt_state, batch):
            seen.append((params, opt_state))
            if plan.microbatch_size == 8:
                params.delete()
                raise MemoryError
            return "done"

        return step

    assert fitting_step(make, PLAN)(*given) == "done"
    (_, first), (params, second) = seen
    assert not params.is_deleted()
    assert params == 0
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    assert all(a is b for a, b in pairs)


def test_an_error_that_is_not_about_memory_is_passed_on_after_one_try():
    calls = []

    def make(plan):
        def step(*args):
            calls.append(plan)
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: something else")

        return step

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        fitting_step(make, PLAN)(*problem())
    assert calls == [PLAN]


def test_with_nothing_smaller_the_error_names_what_was_tried():
    step = fitting_step(running_out(1), PLAN)
    with pytest.raises(DoesNotFitError, match="size 8, 4, 2, 1; there is no smaller one"):
        step(*problem(), key=jax.random.key(0))


def test_tries_are_bounded():
    calls = []
    step = fitting_step(running_out(1, calls=calls), PLAN, max_tries=2)
    with pytest.raises(DoesNotFitError, match="max_tries=2 was reached"):
        step(*problem(), key=jax.random.key(0))
    assert calls == [8, 4]


def test_a_size_that_had_fitted_is_not_copied_for_and_its_loss_is_said():
    step = fitting_step(running_out(8, after=1), PLAN)
    w, state, batch = problem()
    w, state, _ = step(w, state, batch, key=jax.random.key(0))
    with pytest.raises(DoesNotFitError, match=r"which had fitted before.*watch='every'"):
        step(w, state, batch, key=jax.random.key(1))


def test_a_size_that_had_fitted_is_left_without_a_copy_where_nothing_was_lost():
    step = fitting_step(running_out(8, after=1, lost=False), PLAN)
    w, state, batch = problem()
    for seed in (0, 1):
        w, state, _ = step(w, state, batch, key=jax.random.key(seed))
    assert step.plan.microbatch_size == 4
    assert step.changes[0][0] == 8


def test_watching_every_update_recovers_later_too():
    step = fitting_step(running_out(4, after=2), PLAN.with_microbatch_size(4), watch="every")
    w, state, batch = problem()
    for seed in range(4):
        w, state, _ = step(w, state, batch, key=jax.random.key(seed))
    want, start = started_with(4, (0, 1)), shared_step(PLAN.with_microbatch_size(2))
    for seed in (2, 3):
        *want, _ = start(*want, batch, key=jax.random.key(seed))
    assert same((w, state), want)
    assert ja.counts(state)["updates"] == 4


def test_the_record_holds_the_change_and_what_was_tried(tmp_path):
    record = ja.RunRecord(
        plan=PLAN, normalisation={"loss": "n"}, optimizer="adam(0.1)", data="numbers"
    )
    step = fitting_step(running_out(8), PLAN, record=record)
    w, state, batch = problem()
    step(w, state, batch, key=jax.random.key(0))
    record.save(tmp_path / "record.json")
    read = ja.RunRecord.load(tmp_path / "record.json")
    assert read.plan.microbatch_size == 4
    assert [change["examples"] for change in read.plan_changes] == [0]
    assert read.trials == [
        {
            "what": "microbatch size 8",
            "outcome": "RESOURCE_EXHAUSTED: Out of memory allocating 9.",
        }
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_grouped_batch_is_cut_as_the_groups_of_the_smaller_size_are(replicas):
    plan = ja.BatchPlan(microbatch_size=4, microbatches=3, replicas=replicas)
    smaller = plan.with_microbatch_size(2)
    examples = [{"x": np.arange(3) + 10 * i} for i in range(12 * replicas)]

    def grouped(plan):
        (group,) = ja.groups(iter(examples), plan, batched=False)
        return group.batch

    got = regroup(grouped(plan), plan, smaller)
    assert same(got, grouped(smaller))
    on_device = regroup(jax.tree.map(jnp.asarray, grouped(plan)), plan, smaller)
    assert same(on_device, grouped(smaller))


def test_grouped_batches_are_cut_anew_whenever_the_size_changes():
    plan = PLAN.with_microbatch_size(4)
    grouped_step = ja.make_train_step(loss_fn, TX, None)

    def make(plan):
        def step(params, opt_state, batch, **kwargs):
            assert batch["x"].shape == (plan.microbatches, plan.microbatch_size)
            if plan.microbatch_size == 4:
                raise MemoryError
            return grouped_step(params, opt_state, batch, **kwargs)

        return step

    w, state, batch = problem()
    batch = jax.tree.map(lambda x: x.reshape(2, 4), batch)
    step = fitting_step(make, plan, grouped=True)
    for seed in (3, 4):
        w, state, _ = step(w, state, batch, key=jax.random.key(seed))
    assert same((w, state), started_with(2, (3, 4)))


def test_a_batch_that_is_not_grouped_as_said_is_refused():
    with pytest.raises(ValueError, match=r"shape \(8,\), but grouped=True wants"):
        regroup(jnp.zeros(8), PLAN, PLAN.with_microbatch_size(2))


@pytest.mark.parametrize(
    ("options", "message"), [({"watch": "never"}, "watch must"), ({"max_tries": 0}, "max_tries")]
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fitting_step(real_step, PLAN, **options)


def test_random_keys_and_sharded_arrays_are_kept_and_put_back(run_python):
    run_python(
        """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_accum.memory._kept import Kept
mesh = Mesh(np.array(jax.devices()), ("data",))
tree = {
    "key": jax.random.key(7), "raw": jax.random.PRNGKey(7), "none": None, "number": 3,
    "sharded": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data"))),
    "keys": jax.device_put(jax.random.split(jax.random.key(1), 4), NamedSharding(mesh, P())),
}
shown = lambda t: [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                   else x) for x in jax.tree.leaves(t) if hasattr(x, "dtype")]
where = [x.sharding for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
before, kept = [x.copy() for x in shown(tree)], Kept(tree)
for turn in range(2):  # the copy outlives its use
    [x.delete() for x in jax.tree.leaves(tree) if hasattr(x, "delete")]
    tree = kept.restored(tree)
    assert [x.sharding for x in jax.tree.leaves(tree) if hasattr(x, "dtype")] == where
    for a, b in zip(shown(tree), before, strict=True):
        assert np.array_equal(a, b)
    tree["sharded"] = jax.jit(lambda x: x + 1, donate_argnums=0)(tree["sharded"])
assert jnp.issubdtype(tree["key"].dtype, jax.dtypes.prng_key)
""",
        devices=2,
    )

"""BatchPlan: the arithmetic of microbatches, replicas and examples per update."""

import jax
import pytest

import jax_accum as ja


@pytest.mark.parametrize(
    ("sizes", "per_update", "per_replica"),
    [((2, 8, 2), 32, 16), ((1, 1, 1), 1, 1), ((3, 5, 7), 105, 15)],
    ids=["two replicas of eight microbatches", "one example", "odd sizes"],
)
def test_examples_per_update_are_the_product_of_all_three(sizes, per_update, per_replica):
    m, a, d = sizes
    plan = ja.BatchPlan(microbatch_size=m, microbatches=a, replicas=d)
    assert (plan.examples_per_update, plan.examples_per_replica) == (per_update, per_replica)


def test_devices_that_share_a_model_are_one_replica():
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    plan = ja.BatchPlan.from_mesh(mesh, microbatch_size=2, microbatches=8)
    assert (plan.replicas, plan.examples_per_update) == (4, 64)
    both = ja.BatchPlan.from_mesh(
        mesh, microbatch_size=2, microbatches=8, data_axes=("data", "model")
    )
    assert both.examples_per_update == 128


def test_a_global_batch_gives_the_number_of_microbatches():
    plan = ja.BatchPlan.from_global_batch(96, microbatch_size=3, replicas=4)
    assert plan == ja.BatchPlan(microbatch_size=3, microbatches=8, replicas=4)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 6, 12, 24])
def test_another_microbatch_size_keeps_the_examples_per_update(m):
    plan = ja.BatchPlan(microbatch_size=4, microbatches=6, replicas=3)
    other = plan.with_microbatch_size(m)
    assert other.microbatch_size == m
    assert other.replicas == 3
    assert other.examples_per_update == plan.examples_per_update


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ja.BatchPlan(microbatch_size=4, microbatches=6).with_microbatch_size(5),
            r"microbatch_size=5 .* Divisors: 1, 2, 3, 4, 6, 8, 12, 24\.",
        ),
        (
            lambda: ja.BatchPlan.from_global_batch(24, microbatch_size=5, replicas=2),
            r"microbatch_size=5 .* Sizes that do: 1, 2, 3, 4, 6, 12\.",
        ),
        (
            lambda: ja.BatchPlan.from_global_batch(25, microbatch_size=5, replicas=4),
            r"25 cannot be shared evenly by 4 replicas.* 24 or 28",
        ),
        (
            lambda: ja.BatchPlan.from_global_batch(3, microbatch_size=1, replicas=4),
            r"multiple of 4: 4",
        ),
        (
            lambda: ja.BatchPlan.from_mesh(
                jax.sharding.AbstractMesh((2,), ("fsdp",)), microbatch_size=1, microbatches=1
            ),
            r"data_axes names \['data'\]",
        ),
        (lambda: ja.BatchPlan(microbatch_size=0, microbatches=1), "microbatch_size must be at"),
    ],
    ids=[
        "microbatch size that does not divide",
        "microbatch size that does not divide a replica's part of the global batch",
        "replicas that do not divide the global batch",
        "more replicas than examples",
        "mesh without that data axis",
        "microbatch of nothing",
    ],
)
def test_an_impossible_plan_says_which_sizes_can(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("bad", [True, 2.0, "2", None])
def test_a_size_that_is_no_integer_is_a_type_error(bad):
    with pytest.raises(TypeError, match="microbatches must be an integer"):
        ja.BatchPlan(microbatch_size=1, microbatches=bad)


def test_the_description_shows_each_product():
    words = ja.BatchPlan(microbatch_size=16, microbatches=8, replicas=12).describe().split("\n")
    assert [line.split("  ")[-2].split()[-1] for line in words] == ["16", "8", "128", "12", "1536"]

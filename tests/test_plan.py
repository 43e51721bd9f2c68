"""BatchPlan: the arithmetic of examples per update."""

import jax
import pytest

import jax_accum as ja


def test_2_examples_8_microbatches_2_replicas_are_32_per_update_16_per_replica():
    plan = ja.BatchPlan(microbatch_size=2, microbatches=8, replicas=2)
    assert (plan.examples_per_update, plan.examples_per_replica) == (32, 16)
    assert "32 examples per update" in " ".join(plan.describe().split())


def test_on_a_mesh_of_4_data_by_2_model_there_are_4_replicas_and_64_examples():
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    replicas = ja.data_replicas(mesh)
    plan = ja.BatchPlan(microbatch_size=2, microbatches=8, replicas=replicas)
    assert (replicas, plan.examples_per_update) == (4, 64)
    assert ja.data_replicas(mesh, ("data", "model")) == 8
    with pytest.raises(ValueError, match=r"data_axes names \['fsdp'\]"):
        ja.data_replicas(mesh, "fsdp")


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_another_microbatch_size_keeps_the_examples_per_update(m):
    plan = ja.BatchPlan(microbatch_size=2, microbatches=8, replicas=3).with_microbatch_size(m)
    assert (plan.microbatch_size, plan.examples_per_update) == (m, 48)


def test_a_size_that_does_not_divide_is_refused_with_those_that_do():
    plan = ja.BatchPlan(microbatch_size=2, microbatches=6)
    with pytest.raises(ValueError, match=r"5 does not divide .*Divisors: 1, 2, 3, 4, 6, 12"):
        plan.with_microbatch_size(5)


@pytest.mark.parametrize("name", ["microbatch_size", "microbatches", "replicas"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_size_that_is_no_positive_integer_is_named(name, value, error):
    with pytest.raises(error, match=f"{name} must be"):
        ja.BatchPlan(**{"microbatch_size": 1, "microbatches": 1, "replicas": 1} | {name: value})

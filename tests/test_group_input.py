"""What the group gradient says to input that it cannot take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import jax_accum as ja

MESH = AbstractMesh((4, 2), ("data", "model"))
BATCH = {"x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)}
W = jnp.ones(3)


def loss_fn(w, batch):
    return ja.Weighted(jnp.sum((batch["x"] @ w - batch["y"]) ** 2), batch["y"].shape[0])


def call(loss_fn=loss_fn, microbatches=2, params=W, batch=BATCH, args=(), **options):
    called = {k: options.pop(k) for k in ("key", "state") if k in options}
    fn = ja.accumulated_value_and_grad(loss_fn, microbatches, **options)
    return jax.eval_shape(lambda p, b: fn(p, b, *args, **called), params, batch)


def returning(make):
    return {"loss_fn": lambda w, batch: make(w, loss_fn(w, batch))}


CASES = {
    "a bare scalar": (
        returning(lambda w, t: t.mean),
        TypeError,
        r"loss_fn must return a jax_accum\.Weighted.*Weighted\(mean \* n, n\)",
    ),
    "auxiliary output not announced": (
        returning(lambda w, t: (t, w)),
        TypeError,
        "pass has_aux=True",
    ),
    "auxiliary output announced and missing": (
        {"has_aux": True},
        TypeError,
        "must return a tuple of 2",
    ),
    "no term": (returning(lambda w, t: {}), ValueError, "empty dict"),
    "a total that is not a scalar": (
        returning(lambda w, t: ja.Weighted(w * t.total, 1)),
        ValueError,
        r"term 'loss' has a total of shape \(3,\).*must be a scalar",
    ),
    "an integer total": (
        returning(lambda w, t: ja.Weighted(jnp.int32(3), 1)),
        TypeError,
        "total of dtype int32",
    ),
    "a complex weight": (
        returning(lambda w, t: ja.Weighted(t.total, 1j)),
        TypeError,
        "complex weight",
    ),
    "a weight that depends on the parameters": (
        returning(lambda w, t: ja.Weighted(t.total, jnp.sum(w))),
        ValueError,
        "term 'loss' has a weight that depends on the parameters",
    ),
    "a coefficient for no term": (
        {"coefficients": {"router": 0.1}},
        ValueError,
        r"coefficients names the terms \['router'\], but loss_fn returns \['loss'\]",
    ),
    "integer parameters": (
        {"params": {"w": jnp.ones(3, jnp.int32)}},
        TypeError,
        r"params\['w'\] has dtype int32",
    ),
    "A of 0": ({"microbatches": 0}, ValueError, "microbatches must be at least 1, got 0"),
    "A of a half": ({"microbatches": 0.5}, TypeError, "microbatches must be an integer"),
    "rows that A does not divide": (
        {"microbatches": 3},
        ValueError,
        "batch has 8 rows, which 3 equal microbatches do not divide",
    ),
    "rows that the replicas do not divide": (
        {"mesh": MESH, "microbatches": 4},
        ValueError,
        "8 rows, which 4 equal microbatches on each of 4 replicas do not divide",
    ),
    "an empty batch": (
        {"batch": {"x": np.ones((0, 3)), "y": np.ones(0)}},
        ValueError,
        "batch has no rows",
    ),
    "a batch without leaves": ({"batch": {}}, ValueError, "no leaf to split"),
    "leaves of differing leading size": (
        {"batch": BATCH | {"y": np.ones(6)}},
        ValueError,
        r"differ in their leading size: 8 in batch\['x'\], 6 in batch\['y'\]",
    ),
    "a scalar leaf": (
        {"batch": BATCH | {"y": np.float32(1)}},
        ValueError,
        r"batch\['y'\] is a scalar.*batch_axes=None",
    ),
    "an axis of the batch other than the first": (
        {"batch_axes": 1},
        ValueError,
        "batch_axes must hold 0",
    ),
    "a grouped batch of one axis": (
        {"microbatches": None},
        ValueError,
        r"wants a grouped batch, \[A, m, ...\]",
    ),
    "grouped microbatches that the replicas do not divide": (
        {
            "microbatches": None,
            "mesh": MESH,
            "batch": {"x": np.ones((2, 3, 3)), "y": np.ones((2, 3))},
        },
        ValueError,
        "microbatches of 3 rows, which 4 replicas do not divide",
    ),
    "an axis that the mesh lacks": (
        {"mesh": MESH, "data_axes": "batch"},
        ValueError,
        r"data_axes names \['batch'\], but the mesh has the axes \['data', 'model'\]",
    ),
    "a mesh and an axis name": (
        {"mesh": MESH, "axis_name": "data"},
        ValueError,
        "mesh .* or axis_name .*not both",
    ),
    "an axis name that is not bound": (
        {"axis_name": "data"},
        ValueError,
        "axis_name='data' is not bound here",
    ),
    "an unknown reduction": ({"reduce": "twice"}, ValueError, "reduce must be 'once' or 'each'"),
    "an unknown gathering": ({"gather": "never"}, ValueError, "gather must be 'group'"),
    "an unknown use of auxiliary output": (
        returning(lambda w, t: (t, w)) | {"has_aux": True, "aux": "max"},
        ValueError,
        "aux must hold 'stack', 'sum', 'mean' or 'last', got 'max'",
    ),
    "a mean of auxiliary output by one of two weights": (
        returning(lambda w, t: ({"a": t, "b": t}, w)) | {"has_aux": True, "aux": "mean"},
        ValueError,
        r"aux='mean' does not know by which of the weights \['a', 'b'\]",
    ),
    "a state that was not announced": ({"state": W}, ValueError, "has_state=True and .* together"),
    "an unknown policy for states": (
        {"state_reduce": "max"},
        ValueError,
        "state_reduce must be 'mean' or 'first'",
    ),
    "specs without a mesh": ({"param_specs": PartitionSpec()}, ValueError, "needs a mesh"),
    "a spec with an axis that the mesh lacks": (
        {"mesh": MESH, "param_specs": PartitionSpec("fsdp")},
        ValueError,
        r"the mesh has the axes \['data', 'model'\]: no \['fsdp'\]",
    ),
    "a spec longer than the shape": (
        {"mesh": MESH, "param_specs": PartitionSpec(None, "model")},
        ValueError,
        r"for a parameter of shape \(3,\)",
    ),
    "a parameter that the replicas do not divide": (
        {"mesh": MESH, "param_specs": PartitionSpec("data")},
        ValueError,
        "4 replicas do not divide dimension 0",
    ),
    "an accumulator of integers": (
        {"accumulator_dtype": jnp.int32},
        TypeError,
        "accumulator_dtype must be a floating",
    ),
}


@pytest.mark.parametrize(("given", "error", "message"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_named(given, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        call(**given)


def test_a_parameter_sharded_over_some_of_the_data_axes_only_is_refused():
    mesh = AbstractMesh((2, 2), ("replica", "fsdp"))
    with pytest.raises(ValueError, match="over all data axes"):
        call(
            mesh=mesh,
            data_axes=("replica", "fsdp"),
            params=jnp.ones(4),
            batch=BATCH | {"x": np.ones((8, 4))},
            param_specs=PartitionSpec("fsdp"),
        )


def test_a_negative_weight_is_never_a_silent_wrong_number():
    fn = ja.accumulated_value_and_grad(lambda w, b: ja.Weighted(w * jnp.sum(b), jnp.sum(b)), 2)
    (loss, _), grad = jax.jit(fn)(jnp.float32(1), np.float32([-1, 3]))
    assert np.isnan(loss)
    assert np.isnan(grad)

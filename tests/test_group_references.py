"""Accumulating into references: the same bits, less memory where layers are scanned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_accum as ja
from jax_accum import _group_loop

LAYERS, WIDTH, ROWS, CLASSES = 8, 64, 16, 16


def scanned_loss(params, batch):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return ja.losses.softmax_cross_entropy(h @ params["head"], batch["labels"])


def problem(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "layers": jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 8, jnp.float32),
        "head": jnp.asarray(rng.normal(size=(WIDTH, CLASSES)) / 8, jnp.float32),
    }
    labels = rng.integers(0, CLASSES, ROWS)
    labels[rng.random(ROWS) < 0.3] = -100
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    return params, {"x": x, "labels": jnp.asarray(labels)}


def both(loss_fn, **options):
    return [
        jax.jit(ja.accumulated_value_and_grad(loss_fn, 8, references=r, **options))
        for r in (False, True)
    ]


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_result_is_the_same_bit_for_bit():
    params, batch = problem()
    values, references = both(scanned_loss)
    assert_same_bits(values(params, batch), references(params, batch))


def test_scanned_layers_take_at_least_half_a_tree_less():
    params, batch = problem()
    tree = sum(x.nbytes for x in jax.tree.leaves(params))
    values, references = (
        f.lower(params, batch).compile().memory_analysis().temp_size_in_bytes / tree
        for f in both(scanned_loss)
    )
    assert references < values - 0.5


def test_microbatches_without_weight_are_left_out_wherever_they_stand():
    params, batch = problem()
    for ignored in (slice(0, 2), slice(6, 10), slice(12, 16)):
        labels = batch["labels"].at[ignored].set(-100)
        part = {**batch, "labels": labels}
        values, references = both(scanned_loss)
        assert_same_bits(values(params, part)[1], references(params, part)[1])


def test_a_nan_gradient_of_weight_zero_stays_out():
    def hand_written(params, batch):
        valid = batch["labels"] >= 0
        value = scanned_loss(params, batch)
        n = jnp.sum(valid)
        return ja.Weighted(value.total / n * n, n)

    params, batch = problem()
    batch["labels"] = batch["labels"].at[4:6].set(-100)
    (loss, _), grads = both(hand_written)[1](params, batch)
    (want, _), wanted = both(scanned_loss)[0](params, batch)
    assert np.isfinite(loss)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-7), grads, wanted)


def test_terms_of_differing_weight_are_kept_apart():
    def two(params, batch):
        valid = jnp.sum(batch["labels"] >= 0)
        decay = jnp.sum(params["head"] ** 2) * valid
        return {"ce": scanned_loss(params, batch), "decay": ja.Weighted(decay, 1.0)}

    params, batch = problem()
    batch["labels"] = batch["labels"].at[4:6].set(-100)
    values, references = both(two, coefficients={"decay": 0.1})
    assert_same_bits(values(params, batch), references(params, batch))
    full = {**batch, "labels": jnp.zeros(ROWS, jnp.int32)}
    ja.testing.assert_same_gradient(references(params, full)[1], values(params, full)[1])


def test_a_group_without_any_weight_gives_zeros():
    params, batch = problem()
    batch["labels"] = jnp.full(ROWS, -100)
    (loss, _), grads = both(scanned_loss)[1](params, batch)
    assert float(loss) == 0
    assert all(not np.any(g) for g in jax.tree.leaves(grads))


def test_only_microbatches_with_a_weight_run():
    ran = []

    def counting(params, batch):
        jax.debug.callback(lambda x: ran.append(x), batch["x"][0, 0])
        return scanned_loss(params, batch)

    params, batch = problem()
    batch["labels"] = jnp.zeros(ROWS, jnp.int32).at[4:8].set(-100)
    jax.block_until_ready(both(counting)[1](params, batch))
    jax.effects_barrier()
    assert len(ran) == 6


def test_narrow_parameters_are_refused_by_name():
    params, batch = problem()
    params["head"] = params["head"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"params\['head'\] is bfloat16"):
        both(scanned_loss)[1](params, batch)


def test_a_parameter_that_jax_cannot_add_to_in_place_is_explained():
    class Pull:
        def with_refs(self, refs):
            def call(seeds):
                raise TypeError("'NoneType' object is not iterable")

            return call

    with pytest.raises(TypeError, match="a parameter sliced directly"):
        _group_loop._pull_into(Pull(), {}, {})


def test_it_does_not_go_with_a_reduction_in_every_microbatch():
    with pytest.raises(ValueError, match="reduce='once' only"):
        ja.accumulated_value_and_grad(scanned_loss, 8, references=True, reduce="each")


def test_over_replicas_the_gradient_is_that_of_one_device(run_python):
    output = run_python(
        """
import jax, numpy as np
from functools import partial
from jax.sharding import AxisType, PartitionSpec as P
import jax_accum as ja
from tests.test_group_references import problem, scanned_loss
params, batch = problem()
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
want = jax.jit(ja.accumulated_value_and_grad(scanned_loss, 4))(params, batch)[1]
over = jax.jit(ja.accumulated_value_and_grad(scanned_loss, 4, mesh=mesh, references=True))
mapped = ja.accumulated_value_and_grad(scanned_loss, 4, axis_name="data", references=True)
own = jax.jit(jax.shard_map(lambda p, b: mapped(p, b)[1], mesh=mesh,
                            in_specs=(P(), P("data")), out_specs=P()))
for got in (over(params, batch)[1], own(params, batch)):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7), got, want)
print("same")
""",
        devices=2,
    )
    assert "same" in output


def test_replicas_with_differing_numbers_of_microbatches_take_the_same_turns(run_python):
    """A collective in the loss would wait for ever, and what is taken again must not count."""
    output = run_python(
        """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import AxisType, PartitionSpec as P
import jax_accum as ja
from tests.test_group_references import problem

params, batch = problem()
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

def loss(params, batch):
    def layer(h, w):
        return jnp.tanh(h @ w), None
    one = 1 + 0 * jax.lax.pmax(jnp.max(jnp.abs(batch["x"])), "data")  # a collective in the loss
    h, _ = jax.lax.scan(layer, batch["x"] * one, params["layers"])
    value = ja.losses.softmax_cross_entropy(h @ params["head"], batch["labels"])
    mean = jnp.sum(h) / value.weight  # infinite where nothing is supervised
    value = value._replace(total=value.total + 0 * mean)
    return value, (value.weight, jnp.ones(()))

def run(labels, references):
    fn = ja.accumulated_value_and_grad(
        loss, 4, axis_name="data", references=references, has_aux=True, aux=("sum", "sum"))
    own = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    (value, info), grads = own(params, {"x": batch["x"], "labels": labels})
    return value, info.weights, grads, info.aux[0]

for empty in (slice(2, 8), slice(0, 8), slice(8, 14)):
    labels = (batch["labels"] % 16).at[empty].set(-100)
    want, got = run(labels, False), run(labels, True)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(got)), (empty, got[0])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8), got, want)
print("same")
""",
        devices=2,
    )
    assert "same" in output

"""The property of partition invariance, on 8 devices, in 64-bit mode; fails by an exception."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import jax_accum as ja
from tests.programs import model

ROWS = 16
# (m, A, D) with m * A * D = ROWS, and how the gradient is reduced.
PARTITIONS = [
    (16, 1, 1, "once"),
    (4, 4, 1, "once"),
    (1, 16, 1, "once"),
    (2, 4, 2, "once"),
    (2, 2, 4, "each"),
    (1, 2, 8, "once"),
]
FLOOR = 4 * float(np.finfo(np.float32).eps)


@functools.cache
def accumulated(microbatches, replicas, reduce):
    mesh = None
    if replicas > 1:
        devices = np.array(jax.devices()[:replicas])
        mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    return jax.jit(
        ja.accumulated_value_and_grad(
            model.loss_fn,
            microbatches,
            mesh=mesh,
            reduce=reduce,
            coefficients=model.COEFFICIENTS,
            grad_norm=True,
        )
    )


whole = jax.jit(jax.value_and_grad(model.undivided))


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    partition=st.sampled_from(PARTITIONS),
    real=st.integers(3, ROWS),
    order=st.permutations(range(ROWS)),
    pad_last=st.booleans(),
    wide=st.booleans(),
)
def every_partition_gives_the_same(partition, real, order, pad_last, wide):
    m, microbatches, replicas, reduce = partition
    assert m * microbatches * replicas == ROWS
    batch = model.rows(real)
    shuffled = model.padded(batch, ROWS)
    order = np.asarray(range(ROWS) if pad_last else order)
    shuffled = jax.tree.map(lambda x: x[order], shuffled)

    exact_params = model.init(np.float64)
    # The oracle sees the real rows only, padded behind, in the order they were drawn.
    loss, want = whole(exact_params, model.padded(batch, ROWS))
    params = exact_params if wide else jax.tree.map(np.float32, exact_params)
    if not wide:
        exact_params = jax.tree.map(np.float64, params)
        loss, want = whole(exact_params, model.padded(batch, ROWS))
    (got_loss, info), grads = accumulated(microbatches, replicas, reduce)(params, shuffled)

    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(want)))
    if wide:
        limit = 1e-12
    else:
        _, same_width = whole(params, model.padded(batch, ROWS))
        limit = max(4 * model.distance(same_width, want), FLOOR)
    assert model.distance(grads, want) <= limit, (partition, model.distance(grads, want), limit)
    assert all(
        g.dtype == p.dtype for g, p in zip(*map(jax.tree.leaves, (grads, params)), strict=True)
    )
    # A scalar rounds like the sums it comes from: a few ulps of their type.
    ulps = 8 * float(jnp.finfo(jnp.float64 if wide else jnp.float32).eps)
    assert abs(got_loss - loss) <= ulps * abs(loss), (partition, got_loss, loss)
    assert abs(info.grad_norm - norm) <= max(limit, ulps) * norm
    assert info.weights["labels"] == (batch["labels"] >= 0).sum()
    assert info.weights["rows"] == real
    assert info.counts["computed"] <= microbatches
    assert info.counts["microbatches"] <= microbatches * replicas
    if pad_last and replicas == 1:
        assert info.counts["microbatches"] == info.counts["computed"] == -(-real // m)


every_partition_gives_the_same()
print("held")

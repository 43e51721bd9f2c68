"""What the group gradient compiles to on 8 devices, beside a scan written by hand; JSON.

Nothing is run: programs are compiled for shapes, and read.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_accum as ja
from jax_accum.testing import count_collectives

D = 8
mesh = jax.make_mesh((D,), ("data",), axis_types=(AxisType.Auto,))
same, rows = PartitionSpec(), PartitionSpec("data")


def on(spec, shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def params_of(width, hidden):
    shapes = {"in": (width, hidden), "middle": (hidden, hidden), "out": (hidden, 10)}
    return {name: on(same, shape) for name, shape in shapes.items()}


def batch_of(n, width):
    return {"x": on(rows, (n, width)), "y": on(rows, (n,), np.int32)}


def embedded(params, batch):
    """With a table whose gradient, a scatter, XLA does not fuse into the sum."""
    hidden = jnp.tanh(params["table"][batch["y"]] @ params["in"])
    return ja.losses.softmax_cross_entropy(hidden, batch["y"] % 64)


def total(params, batch):
    hidden = jnp.tanh(jnp.tanh(batch["x"] @ params["in"]) @ params["middle"])
    return ja.losses.softmax_cross_entropy(hidden @ params["out"], batch["y"])


def two_terms(params, batch):
    penalty = jnp.sum((batch["x"] @ params["in"]) ** 2)
    return {"labels": total(params, batch), "rows": ja.Weighted(penalty, batch["x"].shape[0])}


def undivided(params, batch):
    return jax.value_and_grad(lambda p: total(p, batch).mean)(params)


def by_hand(microbatches, total=total):
    """Each device scans its rows, and sums and weight are reduced once at the end."""

    def local(params, batch):
        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

        def add(carry, part):
            def summed(p):
                loss = total(p, part)
                return loss.total, loss.weight.astype(jnp.float32)

            (loss, weight), grads = jax.value_and_grad(summed, has_aux=True)(params)
            return jax.tree.map(jnp.add, carry, (loss, weight, grads)), None

        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, weight, grads), _ = jax.lax.scan(add, zero, parts)
        loss, weight, grads = jax.lax.psum((loss, weight, grads), "data")
        return loss / weight, jax.tree.map(lambda g: g * (1 / weight), grads)

    return jax.shard_map(local, mesh=mesh, in_specs=(same, rows), out_specs=same, check_vma=False)


def read(f, params, batch):
    compiled = jax.jit(f).lower(params, batch).compile()
    return {
        "collectives": [c._asdict() for c in count_collectives(compiled)],
        "flops": compiled.cost_analysis()["flops"],
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
    }


def ours(loss_fn, microbatches, **options):
    return ja.accumulated_value_and_grad(loss_fn, microbatches, mesh=mesh, **options)


def reshaped(microbatches):
    """The fault that the tests are for: rows that change their device."""

    def f(params, batch):
        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        return ja.accumulated_value_and_grad(total, None)(params, parts)

    return f


def size(params):
    return sum(4 * int(np.prod(p.shape)) for p in jax.tree.leaves(params))


# Many rows and few parameters, for flops; and the other way round, for the memory of a tree.
tall, wide = params_of(32, 64), params_of(128, 512)
tables = {"table": on(same, (8192, 64)), "in": on(same, (64, 64))}
found = {"tall": size(tall), "wide": size(wide), "table": size(tables), "sizes": {}}
for a in (2, 8, 32):
    batch = batch_of(128 * a * D, 32)
    found["sizes"][a] = {
        "undivided": read(undivided, tall, batch),
        "once": read(ours(total, a), tall, batch),
        "two terms": read(ours(two_terms, a), tall, batch),
        "each": read(ours(total, a, reduce="each"), tall, batch),
        "reshaped": read(reshaped(a), tall, batch),
        "wide": read(ours(total, a), wide, batch_of(16 * a * D, 128)),
        "wide, by hand": read(by_hand(a), wide, batch_of(16 * a * D, 128)),
        "table": read(ours(embedded, a), tables, batch_of(16 * a * D, 1)),
        "table, by hand": read(by_hand(a, embedded), tables, batch_of(16 * a * D, 1)),
    }
print(json.dumps(found))

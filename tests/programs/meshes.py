"""The group gradient and the training step over meshes of 8 devices; prints facts as JSON."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_accum as ja
from jax_accum.testing import count_collectives
from tests.programs import model

COEFFICIENTS = model.COEFFICIENTS
params, batch = model.init(), model.rows(16)
want = jax.jit(jax.grad(model.undivided))(params, batch)
# float32 by another order of summation: a few ulps; a wrong denominator is 1e-2 off.
FEW_ULPS = 32 * float(np.finfo(np.float32).eps)


def mesh_of(shape, names, kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def placed(tree, mesh, specs):
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    return jax.device_put(tree, shardings)


def facts(mesh, specs=None, batch_spec=None, microbatches=2, **options):
    """How far the gradient is off, and which collectives of more than scalars there are."""
    here = params if specs is None else placed(params, mesh, specs)
    rows = batch if batch_spec is None else placed(batch, mesh, batch_spec)
    fn = jax.jit(
        ja.accumulated_value_and_grad(
            model.loss_fn, microbatches, mesh=mesh, coefficients=COEFFICIENTS, **options
        )
    )
    with jax.set_mesh(mesh):
        compiled = fn.lower(here, rows).compile()
        (_, info), grads = compiled(here, rows)
    big = [c for c in count_collectives(compiled) if c.bytes > 64]
    return {
        "close": model.distance(grads, want) <= FEW_ULPS,
        "rows": float(info.weights["rows"]),
        "collectives": sorted({(c.kind, c.in_loop) for c in big}),
        "in the loop": [[c.kind, c.shapes] for c in big if c.in_loop],
        "specs": {k: str(g.sharding.spec) for k, g in grads.items()},
    }


def fsdp(spec):
    return {
        "embedding": PartitionSpec(None, spec),
        "qkv": PartitionSpec(spec),
        "out": PartitionSpec(spec),
        "scale": PartitionSpec(),
        "shift": PartitionSpec(),
        "head": PartitionSpec(spec),
    }


whole, rows = jax.tree.map(lambda _: PartitionSpec(), params), PartitionSpec("data")
one, two = mesh_of((8,), ("data",)), mesh_of((4, 2), ("data", "model"))
explicit = mesh_of((8,), ("data",), AxisType.Explicit)
tensor = whole | {"qkv": PartitionSpec(None, "model"), "head": PartitionSpec("model")}
hybrid = whole | {"qkv": PartitionSpec("data", "model"), "out": PartitionSpec("data")}
found = {
    "sharded": facts(one, whole, rows),
    "replicated batch": facts(one, whole, PartitionSpec()),
    "explicit": facts(explicit, whole, rows),
    "data and model": facts(two, tensor, rows, 4),
    "model, each": facts(two, tensor, rows, 4, reduce="each", param_specs=tensor),
    "fsdp, group": facts(one, fsdp("data"), rows, param_specs=fsdp("data")),
    "fsdp, microbatch": facts(
        one, fsdp("data"), rows, param_specs=fsdp("data"), gather="microbatch", reduce="each"
    ),
    "fsdp and model": facts(two, hybrid, rows, param_specs=hybrid, gather="microbatch"),
    "two data axes": facts(two, whole, PartitionSpec(("data", "model")), data_axes=two.axis_names),
}


def noisy(params, batch, key=None):
    """Dropout of the hidden states, by the key of the microbatch or those of the examples."""
    _, x = model.logits_of(params, batch["tokens"])
    if key is None:
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, x.shape[1:]))(batch["keys"])
    else:
        keep = jax.random.bernoulli(key, 0.5, x.shape)
    x = jnp.where(keep, 2 * x, 0)
    return ja.losses.softmax_cross_entropy(x @ params["head"], batch["labels"]), keep


keyed = batch | {"keys": ja.example_keys(jax.random.key(0), np.arange(16) + 2**40)}
noise = []
for mesh, a in ((None, 1), (None, 4), (one, 2)):
    fn = ja.accumulated_value_and_grad(noisy, a, mesh=mesh, has_aux=True)
    noise.append(jax.jit(fn)(params, keyed)[1])
found["dropout by example"] = [model.distance(g, noise[0]) <= FEW_ULPS for g in noise[1:]]
fn = jax.jit(ja.accumulated_value_and_grad(noisy, 2, mesh=one, has_aux=True))
masks = np.asarray(fn(params, batch, key=jax.random.key(0))[0][1].aux)
found["masks"] = [masks.shape[:2], len({m.tobytes() for m in masks.reshape(16, -1)})]


def counting(params, batch, state):
    """A running mean, and a counter."""
    term = model.loss_fn(params, batch)["labels"]
    new = {"mean": 0.5 * state["mean"] + batch["value"].mean(), "n": state["n"] + 1}
    return term, {"sum": batch["value"].sum(), "last": batch["value"].mean()}, new


valued = batch | {"value": np.arange(16, dtype=np.float32)}
state = {"mean": np.float32(0), "n": np.int32(0)}
for how in ("mean", "first"):
    fn = ja.accumulated_value_and_grad(
        counting,
        2,
        mesh=one,
        has_aux=True,
        has_state=True,
        aux={"sum": "sum", "last": "last"},
        state_reduce=how,
    )
    (_, info), _ = jax.jit(fn)(params, valued, state=state)
    found[f"state, {how}"] = jax.tree.map(float, info.state)
found["aux"] = jax.tree.map(lambda x: np.asarray(x).tolist(), info.aux)

tx = optax.adamw(1e-2)
for name, mesh, options in (
    ("once", one, {}),
    ("each", one, {"reduce": "each"}),
    ("model, each", two, {"reduce": "each", "param_specs": tensor}),
    ("fsdp", one, {"param_specs": fsdp("data")}),
):
    step = ja.make_train_step(model.loss_fn, tx, 2, mesh=mesh, coefficients=COEFFICIENTS, **options)
    p = placed(params, mesh, options.get("param_specs", whole))
    before = jax.tree.map(lambda x: x.sharding, p)
    s = tx.init(p)
    for _ in range(3):
        p, s, _ = step(p, s, batch)
    same = jax.tree.map(lambda x, b: x.sharding.is_equivalent_to(b, x.ndim), p, before)
    lowered = step.lower(p, s, batch).compile().memory_analysis()
    found[f"step, {name}"] = {
        "kept": all(jax.tree.leaves(same)),
        "compiled": step._cache_size(),
        "copied": lowered.output_size_in_bytes - lowered.alias_size_in_bytes,
    }
print(json.dumps(found))

"""Run in a process of its own, with as many devices as asked for: collectives of every way.

Prints one JSON object: way -> reductions and payload per update, read from the compiled program.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_accum as ja
from benchmarks._model import Transformer
from jax_accum.testing import count_collectives

Tree = Any


def ways(model: Transformer, mesh: Any, a: int) -> dict[str, Callable[[Tree, Tree], Tree]]:
    """Each way as `(params, batch) -> gradient` of a batch sharded over `data`."""
    d = mesh.shape["data"]
    rows = NamedSharding(mesh, P(None, "data"))

    def mean(params: Tree, part: Tree) -> jax.Array:
        value = model.loss(params, part)
        return value.total / value.weight

    def summed(grad: Callable[[Tree, Tree], Tree], params: Tree, parts: Tree) -> Tree:
        zeros = jax.tree.map(jnp.zeros_like, params)
        body = lambda acc, part: (jax.tree.map(jnp.add, acc, grad(params, part)), None)  # noqa: E731
        return jax.lax.scan(body, zeros, parts)[0]

    def reshaped(params: Tree, batch: Tree) -> Tree:
        parts = jax.tree.map(lambda x: x.reshape(a, -1, *x.shape[1:]), batch)
        return summed(jax.grad(mean), params, parts)

    def strided(params: Tree, batch: Tree) -> Tree:
        def cut(x: jax.Array) -> jax.Array:
            x = x.reshape(d, a, -1, *x.shape[1:]).swapaxes(0, 1)
            x = x.reshape(a, -1, *x.shape[3:])
            return jax.lax.with_sharding_constraint(x, rows)

        return summed(jax.grad(mean), params, jax.tree.map(cut, batch))

    def microbatching(params: Tree, batch: Tree) -> Tree:
        grad = optax.microbatching.microbatch(
            jax.grad(mean),
            argnums=1,
            microbatch_size=batch["tokens"].shape[0] // a,
            accumulator=optax.microbatching.AccumulationType.SUM,
        )
        return grad(params, batch)

    once = ja.accumulated_value_and_grad(model.loss, a, mesh=mesh)
    each = ja.accumulated_value_and_grad(model.loss, a, mesh=mesh, reduce="each")
    mapped = ja.accumulated_value_and_grad(model.loss, a, axis_name="data")

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=True)
    def own_shard_map(params: Tree, batch: Tree) -> Tree:
        return mapped(params, batch)[1]

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    def across_calls(params: Tree, batch: Tree) -> Tree:
        keep = optax.GradientTransformation(
            lambda p: jax.tree.map(jnp.zeros_like, p), lambda g, s, p=None: (g, g)
        )
        opt = ja.MultiSteps(keep, a, axis_name="data")

        def body(carry: Any, part: Tree) -> tuple[Any, None]:
            params, state = carry
            value, grads = jax.value_and_grad(mean)(params, part)
            del value
            weight = jnp.sum(part["mask"][:, 1:])
            return opt.apply(grads, state, params, weight=weight), None

        parts = jax.tree.map(lambda x: x.reshape(a, -1, *x.shape[1:]), batch)
        (_, state), _ = jax.lax.scan(body, (params, opt.init(params)), parts)
        return state.inner_opt_state

    known = {
        "jit, batch.reshape(A, -1)": reshaped,
        "jit, strided split": strided,
        "jax_accum, mesh": lambda params, batch: once(params, batch)[1],
        "jax_accum, mesh, reduce='each'": lambda params, batch: each(params, batch)[1],
        "jax_accum, own shard_map": own_shard_map,
        "jax_accum, MultiSteps in shard_map": across_calls,
    }
    if hasattr(optax, "microbatching"):
        known["optax.microbatching"] = microbatching
    return known


def main(d: int, cuts: list[int], quick: bool) -> dict[str, Any]:
    """Reads the programs of every way for D devices and each A."""
    mesh = jax.make_mesh((d,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:d])
    sizes = {"vocabulary": 64, "length": 16, "width": 32} if quick else {}
    model = Transformer(layers=1, **sizes)  # every kind of leaf; more layers only repeat it
    params = jax.device_put(model.init(), NamedSharding(mesh, P()))
    unit = sum(x.nbytes for x in jax.tree.leaves(params))
    found: dict[str, Any] = {}
    for a in cuts:
        batch = jax.device_put(model.batch(a * d), NamedSharding(mesh, P("data")))
        for way, call in ways(model, mesh, a).items():
            compiled = jax.jit(call).lower(params, batch).compile()
            found[f"A={a}/{way}"] = summary(compiled, unit, a, d, "MultiSteps" in way)
    return found


def summary(compiled: Any, unit: int, a: int, d: int, branches: bool) -> dict[str, float]:
    """Payload per update in trees of parameters; what stands in a loop runs A times.

    Of an accumulator across calls the loop is over calls, and with `branches` what stands
    in the branch that ends a group runs once.
    """
    if branches and a > 1:  # a group of one ends with every call
        require_in_branch(compiled.as_text())
    totals = {"inside": 0.0, "after": 0.0, "payload": 0.0, "gathers": 0.0}
    for c in count_collectives(compiled):
        times = a if c.in_loop and not branches else 1
        size = c.bytes * (d if c.kind == "reduce-scatter" else 1)
        if c.kind in ("all-reduce", "reduce-scatter"):
            if size < 1e-3 * unit:  # scalars: weights, counters
                continue
            totals["inside" if times > 1 or (c.in_loop and not branches) else "after"] += 1
            totals["payload"] += times * size / unit
        else:
            totals["gathers"] += times
    return totals


def require_in_branch(text: str) -> None:
    """Raises unless every reduction of matrices stands in a branch of a conditional."""
    branches = set(re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", text))
    for names in re.findall(r"branch_computations=\{([^}]*)\}", text):
        branches |= {name.strip().lstrip("%") for name in names.split(",")}
    where = ""
    for line in text.splitlines():
        if line and not line.startswith(" ") and "{" in line:
            where = line.split()[0].lstrip("%")
        if re.search(r"\[\d+,\d+\].* all-reduce\(", line) and where not in branches:
            raise RuntimeError(f"a reduction stands in {where}, which is no branch")


if __name__ == "__main__":
    d, cuts, quick = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "quick"
    print(json.dumps(main(d, cuts, quick)))

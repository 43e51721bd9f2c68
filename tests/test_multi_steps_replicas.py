"""`MultiSteps` over replicas: one reduction per update, global denominators, local sums."""

import pytest

# Each program runs in a process of its own, with 8 devices, and asserts for itself.
COMMON = """
import re
from functools import partial
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_accum as ja

D = 8
mesh = jax.make_mesh((D,), ("data",), axis_types=(AxisType.Auto,))
# Two microbatches on each replica: per-token gradients and tokens, all of them different.
GRADS = np.arange(16.0, dtype=np.float32).reshape(2, D)
TOKENS = ((np.arange(16) * 7) % 5).astype(np.float32).reshape(2, D)
MEAN = float((GRADS.astype(np.float64) * TOKENS).sum() / TOKENS.sum())

def near(x, want):
    np.testing.assert_allclose(np.asarray(x, np.float64), want, rtol=1e-6)

def all_reduces(text):
    return [line for line in text.splitlines() if re.search(r" all-reduce(-start)?\\(", line)]
"""

GROUP_IN_ONE_CALL = """
for check_vma in (True, False):
    for way in ("apply", "update"):
        for guarded in (False, True):
            inner = optax.sgd(1.0)
            opt = ja.MultiSteps(ja.guard(inner) if guarded else inner, 2, axis_name="data")

            def group(grads, tokens):
                params, state = jnp.zeros(()), opt.init(jnp.zeros(()))
                for g, w in zip(grads[:, 0], tokens[:, 0]):
                    if way == "apply":
                        params, state = opt.apply(g, state, params, weight=w, examples=2)
                    else:
                        updates, state = opt.update(g, state, params, weight=w, examples=2)
                        params = params + updates
                return params, state.counts, state.updated

            f = jax.jit(jax.shard_map(group, mesh=mesh, in_specs=P(None, "data"),
                        out_specs=P(), check_vma=check_vma))
            params, counts, updated = f(GRADS, TOKENS)
            near(params, -MEAN)
            got = ja.counts(counts)
            assert got["tokens"] == TOKENS.sum() and got["examples"] == 32, got
            assert got["microbatches"] == 16 and got["updates"] == 1, got
            assert bool(updated)
print("ok")
"""

ACROSS_CALLS = """
opt = ja.MultiSteps(optax.sgd(1.0, momentum=0.5), 2, axis_name="data")
params = {"w": jnp.zeros(3)}
state = opt.init(params, replicas=D)
specs = opt.state_specs(state)
assert state.acc_grads["w"].shape == (D, 3)
params, state = jax.device_put(
    (params, state), jax.tree.map(partial(NamedSharding, mesh), ({"w": P()}, specs)))

traces = []

def call(params, state, g, w, flush):
    traces.append(1)
    grads = {"w": jnp.full(3, g[0])}
    return opt.apply(grads, state, params, weight=w[0], flush=flush)

mapped = jax.shard_map(call, mesh=mesh, check_vma=True,
    in_specs=(P(), specs, P("data"), P("data"), P()), out_specs=(P(), specs))
step = jax.jit(mapped, donate_argnums=(0, 1))
text = step.lower(params, state, GRADS[0], TOKENS[0], False).compile().as_text()
entry = text[text.index("ENTRY"):]
# In one branch of one conditional, and nowhere else: gradients, weight and counters.
assert len(all_reduces(text)) >= 1 and not all_reduces(entry), all_reduces(entry)
holders = [b for b in re.split(r"\\n(?=\\S)", text) if all_reduces(b)]
assert len(holders) == 1, len(holders)
assert sum("f32[3" in line for line in all_reduces(text)) == 1

for n in range(2):
    params, state = step(params, state, GRADS[n], TOKENS[n], False)
    local = np.asarray(state.acc_grads["w"])[:, 0]
    want = (GRADS * TOKENS)[: n + 1].sum(axis=0)
    near(local, want)
    assert ja.counts(state)["tokens"] == TOKENS[: n + 1].sum()
assert bool(state.updated) and int(state.mini_step) == 0
near(params["w"], [-MEAN] * 3)
# A ragged end: only some replicas have a microbatch left.
weights = np.where(np.arange(D) < 3, TOKENS[0], 0).astype(np.float32)
params, state = step(params, state, np.where(weights > 0, GRADS[0], np.nan), weights, True)
assert np.isfinite(params["w"]).all() and bool(state.updated)
assert ja.counts(state)["tokens"] == TOKENS.sum() + weights.sum()
# And a group in which no replica has any.
before = np.asarray(params["w"]).tobytes()
nothing = np.full(D, np.nan, np.float32), np.zeros(D, np.float32)
for flush in (False, True):
    params, state = step(params, state, *nothing, flush)
assert np.asarray(params["w"]).tobytes() == before
assert ja.counts(state)["skipped_empty"] == 1 and ja.counts(state)["updates"] == 2
assert len(traces) == 1
print("ok")
"""

PMAP = """
import warnings
opt = ja.MultiSteps(ja.guard(optax.sgd(1.0)), 2, axis_name="data")
params = jnp.zeros(D)
state = jax.pmap(opt.init, axis_name="data")(params)
step = jax.pmap(lambda p, s, g, w: opt.apply(g, s, p, weight=w), axis_name="data")
params, state = step(params, state, GRADS[0], TOKENS[0])
assert ja.counts(state)["tokens"] == TOKENS[0].sum()
params, state = step(params, state, GRADS[1], TOKENS[1])
near(params, [-MEAN] * D)
counts = ja.counts(state)
assert counts["tokens"] == TOKENS.sum() and counts["microbatches"] == 16, counts
print("ok")
"""

TWO_AXES_AND_GROUPS_OF_ONE = """
mesh2 = jax.make_mesh((2, 4), ("host", "data"), axis_types=(AxisType.Auto,) * 2)
for check_vma in (True, False):
    for weighted in (True, False):
        opt = ja.MultiSteps(optax.sgd(1.0), 1, axis_name=("host", "data"))

        def one(g, w):
            params = jnp.zeros(())
            kwargs = {"weight": w[0]} if weighted else {}
            return opt.apply(g[0], opt.init(params), params, **kwargs)[0]

        f = jax.jit(jax.shard_map(one, mesh=mesh2, in_specs=P(("host", "data")), out_specs=P(),
                    check_vma=check_vma))
        want = (GRADS[0] * TOKENS[0]).sum() / TOKENS[0].sum() if weighted else GRADS[0].mean()
        near(f(GRADS[0], TOKENS[0]), -want)
print("ok")
"""

REDUCED_ALREADY = """
opt = ja.MultiSteps(optax.sgd(1.0), 2, axis_name="data")

def call(g):
    params = jnp.zeros(())
    return opt.apply(jax.lax.pmean(g[0], "data"), opt.init(params), params)[0]

try:
    jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P())(GRADS[0])
except ValueError as error:
    assert "reduced already" in str(error) and "pcast" in str(error), error
    print("ok")
"""

SHARDING_OF_ACCUMULATORS = """
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((D,), ("model",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("model"))
        params = {"w": jax.device_put(jnp.ones((16, 4)), sharding)}
        opt = ja.MultiSteps(optax.adam(0.1), 2, compensated=True)
        for state in (opt.init(params), jax.jit(opt.init)(params)):
            for tree in (state.acc_grads, state.compensation):
                assert tree["w"].sharding.is_equivalent_to(sharding, 2), (kind, tree["w"].sharding)
        traces = []

        def call(params, state, grads):
            traces.append(1)
            return opt.apply(grads, state, params)

        step = jax.jit(call, donate_argnums=(0, 1))
        for _ in range(3):
            params, state = step(params, state, {"w": jax.device_put(jnp.ones((16, 4)), sharding)})
            for x in (params["w"], state.acc_grads["w"]):
                assert x.sharding.is_equivalent_to(sharding, 2), (kind, x.sharding)
        assert len(traces) == 1
print("ok")
"""

UNREDUCED = """
mesh = jax.make_mesh((D,), ("data",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    params = jax.device_put(jnp.ones((16, 4)), P())
    x = jax.device_put(jnp.ones((8, 16)), P("data"))

    @jax.jit
    def gradient(params, x):
        varied = jax.reshard(params, P(reduced={"data"}))
        return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(varied)

    grads = gradient(params, x)
    for k in (1, 2):
        opt = ja.MultiSteps(optax.sgd(1.0), k)
        try:
            opt.update(grads, opt.init(params), params)
        except ValueError as error:
            assert "unreduced over ['data']" in str(error) and "jax.reshard" in str(error), error
        else:
            raise AssertionError(k)
    opt.update(jax.reshard(grads, P()), opt.init(params), params)
print("ok")
"""

PROGRAMS = {
    "a group over replicas has one denominator, of all its tokens": GROUP_IN_ONE_CALL,
    "sums stay local between calls and are reduced once, in the ending branch": ACROSS_CALLS,
    "pmap": PMAP,
    "several axes, and groups of one": TWO_AXES_AND_GROUPS_OF_ONE,
    "gradients that were reduced already are refused": REDUCED_ALREADY,
    "gradients that are not reduced yet are refused": UNREDUCED,
    "accumulators take the sharding of the parameters, under jit as well": SHARDING_OF_ACCUMULATORS,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_eight_devices(name, run_python):
    assert run_python(COMMON + PROGRAMS[name], devices=8).split() == ["ok"]

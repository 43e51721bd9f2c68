"""Memory that really runs out, and one process of two that cannot go on."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

LIMITED = """
import json, resource
import jax, jax.numpy as jnp, numpy as np, optax
import jax_accum as ja

def loss_fn(w, x):
    h = jnp.tanh(x @ w)
    h = jnp.sort(h, axis=1)  # something that is not fused away
    return ja.Weighted(jnp.sum((h @ w) ** 2), x.shape[0])

tx = ja.guard(optax.trace(0.9))
steps = {}
def make(plan):
    step = ja.make_train_step(loss_fn, tx, plan.microbatches)
    return steps.setdefault(plan.microbatch_size, step), (w, state, x)

plan = ja.BatchPlan(microbatch_size=8, microbatches=1)
w = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32) / 8
x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 16384, 64)), jnp.float32)
state = tx.init(w)
start = jax.tree.map(jnp.copy, (w, state))
needs = {m: ja.memory.analyze(*make(plan.with_microbatch_size(m))[:1], w, state, x).temporary
         for m in (8, 4, 2)}
address_space = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
between = (needs[8] + needs[4]) // 2
resource.setrlimit(resource.RLIMIT_AS, (address_space + between, hard))
step = ja.memory.fitting_step(make, plan)
got = step(w, state, x)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
fresh = steps[step.plan.microbatch_size](*start, x)
counts = ja.counts(got[1])
pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(fresh), strict=True))
print(json.dumps({
    "sizes": [8, step.plan.microbatch_size], "needs": needs, "lost": w.is_deleted(),
    "counts": counts == ja.counts(fresh[1]), "updates": counts["updates"],
    "microbatches": counts["microbatches"],
    "bitwise": all(np.array_equal(a, b) for a, b in pairs),
    "norm": float(got[2]["grad_norm"]),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, as Linux does")
def test_a_step_that_really_runs_out_falls_back_to_the_update_of_the_smaller_size(run_python):
    found = json.loads(run_python(LIMITED).splitlines()[-1])
    assert found["sizes"][1] < 8
    assert found["lost"]  # the failed attempt took the buffers that were donated to it
    assert found["counts"]
    assert found["updates"] == 1
    assert found["microbatches"] == 8 // found["sizes"][1]
    assert found["bitwise"]
    assert found["norm"] > 0


TWO = """
import json, os, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, port, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)
import jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax_accum as ja

mesh = Mesh(np.array(jax.devices()), ("data",))
def place(x, spec):
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), x)

def loss_fn(w, x):
    return ja.Weighted(jnp.sum((x @ w) ** 2), x.shape[0])

tx = ja.guard(optax.adam(0.1))
def make(plan):
    return ja.make_train_step(loss_fn, tx, plan.microbatches, mesh=mesh)

def start():
    w = place(np.ones(3, np.float32), P())
    return w, tx.init(w)

tried = []
def rehearsal(needs):
    tried.append(step.plan.microbatch_size)
    if rank == 1 and step.plan.microbatch_size > 2:
        if fault == "memory":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        raise ZeroDivisionError("not about memory")

plan = ja.BatchPlan(microbatch_size=8, microbatches=1, replicas=2)
own = np.random.default_rng(rank).standard_normal((8, 3)).astype(np.float32)
batch = place(own, P("data"))
timeout = 60
if fault == "late":
    # The rehearsal goes well, and then one process cannot start after all.
    timeout, rehearsal, real = 20, ja.memory.rehearse, make
    class Late:
        def __init__(self, step):
            self.trace, self.lower = step.trace, step.lower

        def __call__(self, *args):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    def make(plan):
        return Late(real(plan)) if rank == 1 else real(plan)

step = ja.memory.fitting_step(make, plan, rehearsal=rehearsal, timeout=timeout)
try:
    w, state = start()
    for _ in range(3):
        w, state, metrics = step(w, state, batch)
    fresh, fresh_state = start()
    for _ in range(3):
        fresh, fresh_state, _ = make(step.plan)(fresh, fresh_state, batch)
    pairs = zip(jax.tree.leaves((w, state)), jax.tree.leaves((fresh, fresh_state)), strict=True)
    print(json.dumps({
        "tried": tried, "plan": step.plan.microbatches, "w": np.asarray(w).tolist(),
        "counts": ja.counts(state),
        "bitwise": all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs),
    }))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "said": str(error)}), flush=True)
    if fault == "late":
        os._exit(0)  # as a process that ends of an error would
jax.distributed.shutdown()
"""


def run_two(run_python, port, fault):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_python, TWO, str(rank), str(port), fault) for rank in range(2)]
        outputs = [run.result() for run in runs]
    return [
        json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        for output in outputs
    ]


def test_when_one_of_two_processes_cannot_both_take_the_smaller_size(run_python, free_port):
    found = run_two(run_python, free_port, "memory")
    for own in found:
        assert own["tried"] == [8, 4, 2]
        assert own["plan"] == 4
        assert own["bitwise"]
        assert own["counts"]["updates"] == 3
        assert own["counts"]["microbatches"] == 3 * 2 * 4
    assert found[0]["w"] == found[1]["w"]


def test_when_one_runs_out_after_the_other_has_begun_both_end_with_an_error(run_python, free_port):
    found = run_two(run_python, free_port, "late")
    assert found[1]["error"] == "TimeoutError"
    assert "here is 'exhausted'. It may wait in a collective" in found[1]["said"]
    assert "error" in found[0]  # of its broken connection: it did not wait for ever


def test_when_one_of_two_processes_fails_otherwise_both_say_so(run_python, free_port):
    found = run_two(run_python, free_port, "other")
    assert [own["error"] for own in found] == ["RuntimeError", "ZeroDivisionError"]
    assert "failed in process 1" in found[0]["said"]

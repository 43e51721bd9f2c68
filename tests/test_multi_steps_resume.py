"""Stopped in mid-group, saved with NumPy and restored in a new process, it goes on bitwise."""

PROGRAM = """
import pickle, sys
import jax, jax.numpy as jnp, numpy as np, optax
import jax_accum as ja

first, last, source, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
inner = ja.guard(optax.adamw(0.1), loss_scale=ja.DynamicLossScale(8.0, growth_interval=1))
opt = ja.MultiSteps(inner, 4, compensated=True)
params = {"w": jnp.linspace(-1, 1, 5), "b": jnp.ones((), jnp.bfloat16)}
state = opt.init(params)
if source != "-":
    with open(source, "rb") as file:
        leaves = pickle.load(file)
    params, state = jax.tree.unflatten(jax.tree.structure((params, state)), leaves)
step = jax.jit(lambda p, s, g, w: opt.apply(g, s, p, weight=w, examples=2))
for n in range(first, last):
    grads = jax.tree.map(lambda p: jnp.sin(n + jnp.arange(p.size)).reshape(p.shape).astype(p.dtype),
                         {"w": np.ones(5, np.float32), "b": jnp.ones((), jnp.bfloat16)})
    params, state = step(params, state, grads, jnp.float32(1 + n % 3))
with open(target, "wb") as file:
    pickle.dump([np.asarray(x) for x in jax.tree.leaves((params, state))], file)
print(ja.counts(state))
"""


def test_a_run_stopped_after_microbatch_3_of_4_goes_on_as_if_it_had_not_been(run_python, tmp_path):
    whole, half, resumed = (str(tmp_path / name) for name in ("whole", "half", "resumed"))
    want = run_python(PROGRAM, "0", "9", "-", whole)
    run_python(PROGRAM, "0", "3", "-", half)
    assert run_python(PROGRAM, "3", "9", half, resumed) == want
    assert "'microbatches': 9" in want
    assert "'updates': 2" in want
    with open(whole, "rb") as a, open(resumed, "rb") as b, open(half, "rb") as c:
        whole, resumed, half = a.read(), b.read(), c.read()
    assert whole == resumed
    assert whole != half

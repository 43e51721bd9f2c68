"""make_train_step: one update per call, skips, counters, donation, and what it compiles to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_accum as ja


def loss_fn(w, batch):
    return ja.Weighted(jnp.sum(w * batch["x"] * batch["real"]), jnp.sum(batch["real"]))


def batch_of(*x, real=None):
    x = np.float32(x)
    return {"x": x, "real": np.ones_like(x) if real is None else np.float32(real)}


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_the_optimizer_runs_once_per_call_whatever_the_number_of_microbatches():
    schedule = optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5})
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(schedule))
    step = ja.make_train_step(loss_fn, tx, 4, donate=False)
    w = jnp.float32(10)
    state = tx.init(w)
    seen = []
    for _ in range(3):
        w, state, metrics = step(w, state, batch_of(8, 0, 0, 0))
        seen.append((float(w), float(metrics["grad_norm"])))
    # A gradient of 2, clipped to 1 after accumulation; the rate halves with every update.
    assert seen == [(9.0, 2.0), (8.5, 2.0), (8.25, 2.0)]


@pytest.mark.parametrize(
    "wrap",
    [lambda tx: tx, ja.guard, lambda tx: ja.MultiSteps(tx, 1)],
    ids=["plain optimizer", "guard", "MultiSteps"],
)
def test_a_group_with_nothing_supervised_is_a_skip(wrap):
    tx = wrap(optax.adamw(0.1, weight_decay=0.1))
    step = ja.make_train_step(loss_fn, tx, 2, donate=False)
    w = jnp.float32(1)
    w, state, _ = step(w, tx.init(w), batch_of(1, 2))
    before = bits((w, getattr(state, "inner_state", getattr(state, "inner_opt_state", state))))
    w, state, metrics = step(w, state, batch_of(1, 2, real=[0, 0]))
    inner = getattr(state, "inner_state", getattr(state, "inner_opt_state", state))
    assert not metrics["updated"]
    assert bits((w, inner)) == before
    if inner is not state:
        counted = ja.counts(state)
        assert (counted["attempts"], counted["updates"], counted["skipped_empty"]) == (2, 1, 1)


def test_the_loss_scale_of_a_guard_is_applied_and_undone_and_halved_after_overflow():
    tx = ja.guard(optax.sgd(1.0), loss_scale=ja.DynamicLossScale(initial=8.0))
    step = ja.make_train_step(loss_fn, tx, 2, donate=False)
    w = jnp.float32(1)
    w2, state, metrics = step(w, tx.init(w), batch_of(np.inf, 1))
    assert (w2, metrics["updated"], ja.loss_scale(state)) == (1, False, 4)
    w3, state, metrics = step(w2, state, batch_of(1, 2))
    assert (w3, metrics["updated"], metrics["grad_norm"]) == (-0.5, True, 1.5)


def test_counters_of_microbatches_examples_and_tokens_do_not_wrap():
    def many(w, batch):
        return ja.Weighted(w * jnp.sum(batch), 1.5e9)

    tx = ja.guard(optax.sgd(0.1))
    step = ja.make_train_step(many, tx, 2)
    w = jnp.float32(1)
    w, state, _ = step(w, tx.init(w), np.ones(4, np.float32), examples=4)
    counted = ja.counts(state)
    assert counted["tokens"] == 3_000_000_000
    assert (counted["microbatches"], counted["examples"]) == (2, 4)


def test_tokens_of_several_terms_are_those_of_the_term_that_is_named():
    def two(w, batch):
        return {"a": ja.Weighted(w * jnp.sum(batch), 7), "b": ja.Weighted(w, 1)}

    tx = ja.guard(optax.sgd(0.1))
    w = jnp.float32(1)
    for name, tokens in (("a", 14), ("b", 2), (None, 0)):
        step = ja.make_train_step(two, tx, 2, tokens_term=name, donate=False)
        _, state, _ = step(w, tx.init(w), np.ones(4, np.float32))
        assert ja.counts(state)["tokens"] == tokens


def test_a_shorter_group_does_not_recompile_and_counts_what_it_held():
    tx = ja.guard(optax.sgd(0.1))
    step = ja.make_train_step(loss_fn, tx, 4)
    w = jnp.float32(1)
    w, state, _ = step(w, tx.init(w), batch_of(1, 2, 3, 4))
    w, state, _ = step(w, state, batch_of(1, 2, 3, 4, real=[1, 1, 1, 0]))
    assert step._cache_size() == 1
    assert ja.counts(state)["microbatches"] == 7


def test_reading_nothing_waits_for_nothing():
    tx = optax.sgd(0.1)
    step = ja.make_train_step(loss_fn, tx, 2)
    w = jnp.float32(1)
    batch = jax.device_put(batch_of(1, 2))
    w, state, _ = step(w, tx.init(w), batch)
    with jax.transfer_guard("disallow"):
        w, state, metrics = step(w, state, batch)
    assert metrics["updated"]


def test_what_was_donated_and_is_used_again_is_named():
    tx = optax.adam(0.1)
    step = ja.make_train_step(loss_fn, tx, 2)
    w = jnp.ones(3)
    state = tx.init(w)
    old = (w, state)
    w, state, _ = step(w, state, batch_of(1, 2))
    with pytest.raises(ValueError, match=r"(?s)params was deleted.*donate=False"):
        step(old[0], state, batch_of(1, 2))
    with pytest.raises(ValueError, match=r"(?s)opt_state\[0\]\.\w+ was deleted.*donated"):
        step(w, old[1], batch_of(1, 2))
    step(w, state, batch_of(1, 2))


def test_an_array_that_stands_twice_in_the_parameters_is_named():
    tx = optax.sgd(0.1)
    tied = jnp.ones(3)
    params = {"in": tied, "out": tied}

    def tied_loss(params, batch):
        return loss_fn(params["in"] * params["out"], {k: x[:, None] for k, x in batch.items()})

    with pytest.raises(ValueError, match=r"params\['in'\] and params\['out'\] are one array.*copy"):
        ja.make_train_step(tied_loss, tx, 2)(params, tx.init(params), batch_of(1, 2))
    apart = {**params, "out": jnp.copy(tied)}
    ja.make_train_step(tied_loss, tx, 2)(apart, tx.init(apart), batch_of(1, 2))


def test_a_parameter_that_is_no_array_is_named():
    tx = optax.sgd(0.1)
    step = ja.make_train_step(lambda p, b: loss_fn(p["w"], b), tx, 2)
    params = {"w": jnp.ones(()), "activation": jnp.tanh}
    with pytest.raises(TypeError, match=r"params\['activation'\] is a .*, not an array.*equinox"):
        step(params, tx.init({"w": params["w"]}), batch_of(1, 2))


def test_an_error_inside_of_the_loss_says_what_it_was_given():
    def fails(w, batch):
        raise ZeroDivisionError("in the model")

    tx = optax.sgd(0.1)
    w = jnp.ones(())
    step = ja.make_train_step(fails, tx, 2)
    with pytest.raises(ZeroDivisionError) as caught:
        step(w, tx.init(w), batch_of(1, 2, 3, 4))
    (note,) = (note for note in caught.value.__notes__ if "microbatch" in note)
    assert "real: float32[2], x: float32[2]" in note
    assert "microbatches=None" in note


def test_parameters_and_state_take_their_own_buffers():
    def matrix_loss(w, batch):
        return ja.Weighted(jnp.sum((batch @ w) ** 2), batch.shape[0])

    tx = optax.adamw(0.1)
    w = jnp.ones((64, 64))
    step = ja.make_train_step(matrix_loss, tx, 2)
    compiled = step.lower(w, tx.init(w), np.ones((4, 64), np.float32)).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1024  # the metrics
    assert " copy(" not in "".join(
        line for line in compiled.as_text().splitlines() if "f32[64,64]" in line
    )


def test_state_and_auxiliary_output_come_back_in_the_metrics():
    def with_state(w, batch, state):
        term = loss_fn(w, batch)
        return term, batch["x"].sum(), state + batch["x"].sum()

    tx = optax.sgd(0.1)
    step = ja.make_train_step(with_state, tx, 2, has_aux=True, has_state=True, aux="sum")
    w = jnp.float32(1)
    _, _, metrics = step(w, tx.init(w), batch_of(1, 2, 3, 4), state=jnp.float32(100))
    assert (metrics["aux"], metrics["state"]) == (10, 110)


def test_rows_that_lie_on_several_devices_need_a_mesh(run_python):
    program = """
import jax, jax.numpy as jnp, numpy as np, optax, jax_accum as ja
from jax.sharding import AxisType, NamedSharding, PartitionSpec
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
batch = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, PartitionSpec("data")))
loss = lambda w, b: ja.Weighted(w * b.sum(), b.size)
tx = optax.sgd(0.1)
w = jnp.float32(1)
try:
    ja.make_train_step(loss, tx, 2)(w, tx.init(w), batch)
except ValueError as error:
    print(error)
step = ja.make_train_step(loss, tx, 2, mesh=mesh)
state = tx.init(w)
for _ in range(3):
    w, state, _ = step(w, state, batch)
print(step._cache_size())
"""
    said, compiled = run_python(program, devices=2).splitlines()
    assert "sharded over ['data'], but the step was built without a mesh" in said
    assert "data_axes=('data',)" in said
    assert compiled == "1"


def test_an_optimizer_of_another_kind_is_named_when_the_step_is_built():
    class Optimizer:
        """As that of Flax NNX: it has no init."""

        def update(self, model, grads):
            """Changes the model."""

    with pytest.raises(TypeError, match=r"tx must be an Optax .*Optimizer object.*optimizer\.tx"):
        ja.make_train_step(loss_fn, Optimizer(), 2)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="unexpected keyword argument 'grad_nrom'"):
        ja.make_train_step(loss_fn, optax.sgd(1.0), 2, grad_nrom=True)


def test_a_step_is_traced_inside_of_jit_too():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    tx = optax.sgd(0.1)
    step = ja.make_train_step(loss_fn, tx, 2, mesh=mesh)
    w = jax.device_put(jnp.float32(1), NamedSharding(mesh, PartitionSpec()))

    @jax.jit
    def two(w, state, batch):
        w, state, _ = step(w, state, batch)
        return step(w, state, batch)[0]

    np.testing.assert_allclose(two(w, tx.init(w), batch_of(1, 3)), 0.6, rtol=1e-6)

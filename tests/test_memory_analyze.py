"""What a compiled step needs: totals, parts, logits, and what running it really takes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja
from jax_accum.memory import Analysis, _live, analyze, measure

WIDTH, ROWS, VOCABULARY = 32, 16, 512


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def loss_fn(params, x):
    """A cross entropy behind a softmax that is none: attention-like weights."""
    h = jnp.tanh(x @ params["w"])
    h = h * jax.nn.softmax(h @ h.T, axis=-1).sum(-1, keepdims=True)
    return ja.losses.softmax_cross_entropy(h @ params["head"], jnp.zeros(len(x), int))


@pytest.fixture(scope="module")
def step_and_args():
    params = {"w": jnp.ones((WIDTH, WIDTH)), "head": jnp.ones((WIDTH, VOCABULARY))}
    tx = optax.adam(0.1)
    return ja.make_train_step(loss_fn, tx, 4), (params, tx.init(params), jnp.ones((ROWS, WIDTH)))


@pytest.fixture(scope="module")
def analysis(step_and_args):
    step, args = step_and_args
    return analyze(step, *map(shapes, args))


def test_arguments_are_told_apart_to_the_byte(step_and_args, analysis):
    _, args = step_and_args
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in args]
    names = ("parameters", "optimizer state", "batch", "other arguments")
    assert [analysis.part(name) for name in names] == [*sizes, 0]
    assert analysis.arguments == sum(sizes)


def test_parts_add_up_to_the_peak_of_the_compiled_program(step_and_args, analysis):
    step, args = step_and_args
    memory = step.lower(*args).compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    assert analysis.peak == peak == sum(part.bytes for part in analysis.parts)


def test_the_accumulator_is_a_tree_of_parameters_and_said_to_be_an_estimate(analysis):
    parameters = analysis.part("parameters")
    accumulator = analysis.part("gradient accumulator")
    assert parameters <= accumulator < parameters + 1024  # a few scalars are carried too
    assert {part.name for part in analysis.parts if part.estimated} == {
        "gradient accumulator",
        "activations of one microbatch",
    }


def test_logits_are_found_where_a_softmax_is_larger_or_smaller(analysis):
    assert analysis.logits.shape == (ROWS // 4, VOCABULARY)
    assert analysis.logits.bytes == 4 * ROWS // 4 * VOCABULARY
    assert "test_memory_analyze.py" in analysis.logits.where


def test_without_a_cross_entropy_there_are_no_logits():
    found = analyze(jax.jit(lambda x: jax.nn.softmax(x @ x).sum()), jnp.ones((8, 8)))
    assert found.logits is None
    assert found.part("gradient accumulator") == 0


def test_the_report_names_every_part_and_marks_estimates(analysis):
    report = analysis.report()
    for part in analysis.parts:
        if part.bytes:
            (line,) = [line for line in report.splitlines() if line.split("%  ")[-1] == part.name]
            assert ("~" in line) == part.estimated


def test_an_analysis_survives_json(analysis):
    assert Analysis.from_dict(json.loads(json.dumps(analysis.as_dict()))) == analysis


def test_bytes_are_those_of_one_device(run_python):
    run_python(
        """
import jax, jax.numpy as jnp, numpy as np, optax, jax_accum as ja
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
tx = optax.trace(0.9)
w = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, P()))
x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
loss = lambda w, x: ja.Weighted(jnp.sum((x @ w) ** 2), x.shape[0])
state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=w.sharding),
                     jax.eval_shape(tx.init, w))
found = ja.memory.analyze(ja.make_train_step(loss, tx, 2, mesh=mesh), w, state, x)
assert found.part("parameters") == 256, found.parts
assert found.part("batch") == 16 * 64 * 4 // 4, found.parts
""",
        devices=4,
    )


def test_what_a_loop_stacks_is_no_accumulator():
    def run(x):
        return jax.lax.scan(lambda carry, row: (carry + row, 2 * row), jnp.zeros(64), x)

    found = analyze(jax.jit(lambda x: jax.tree.map(jnp.sum, run(x))), jnp.ones((100, 64)))
    carried = ja.memory._traced.carried_bytes(jax.make_jaxpr(run)(jnp.ones((100, 64))))
    assert carried == 64 * 4
    assert found.part("gradient accumulator") <= 64 * 4


def test_random_keys_are_counted(step_and_args):
    found = analyze(jax.jit(lambda key, x: x + jax.random.normal(key)), jax.random.key(0), 1.0)
    assert found.part("parameters") == 8
    assert found.part("optimizer state") == 4


def test_a_function_that_is_not_jitted_is_refused():
    with pytest.raises(TypeError, match="step must be jitted"):
        analyze(lambda x: x, 1.0)


def test_an_error_of_the_step_is_passed_on(step_and_args):
    step, (params, state, _) = step_and_args
    with pytest.raises(ValueError, match="which 4 equal microbatches do not divide"):
        analyze(step, params, state, jnp.ones((6, WIDTH)))


def test_memory_that_a_program_takes_is_what_was_read_off_it(run_python):
    output = run_python(
        """
import jax, jax.numpy as jnp, jax_accum as ja
# 128 MiB beside the arguments, between two matrix products; the result is 1 MiB.
step = jax.jit(lambda x, u, v: jnp.tanh(x @ u) @ v)
args = jnp.ones((2**15, 32)), jnp.ones((32, 1024)), jnp.ones((1024, 8))
found = ja.memory.analyze(step, *args)
measured = ja.memory.measure(lambda: step(*args), updates=3)
later = measured.later[0]
print(found.peak - found.arguments, measured.first[0].peak - measured.first[0].baseline, later.how)
"""
    )
    predicted, first, *how = output.split()
    assert int(predicted) >= 2**27
    assert int(first) == pytest.approx(int(predicted), rel=0.15)
    assert " ".join(how) == "resident memory of the process, sampled"


class FakeDevice:
    platform, id = "gpu", 3

    def __init__(self, *stats):
        self.stats = list(stats)

    def memory_stats(self):
        return self.stats.pop(0) if len(self.stats) > 1 else self.stats[0]


def test_counters_of_a_device_are_read_before_and_after_each_update(monkeypatch):
    def stats(now, peak):
        return {"bytes_in_use": now, "peak_bytes_in_use": peak}

    # Each update asks three times: whether there are counters, before, and after.
    device = FakeDevice(
        *[stats(10, 10), stats(10, 10), stats(30, 90)],
        *[stats(31, 90), stats(31, 90), stats(32, 95)],
        *[stats(33, 95), stats(33, 95), stats(33, 96)],
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    found = measure(lambda: None, updates=3)
    assert found.first[0][:3] == ("gpu:3", 10, 90)
    assert found.later[0][:3] == ("gpu:3", 33, 96)


def test_too_few_updates_and_a_system_without_proc_are_refused(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="updates must be at least 2"):
        measure(lambda: None, updates=1)
    monkeypatch.setattr(_live, "_STATM", tmp_path / "statm")
    with pytest.raises(ValueError, match="memory cannot be measured here"):
        measure(lambda: np.zeros(1))

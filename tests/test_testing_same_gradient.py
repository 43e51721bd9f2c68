"""assert_same_gradient: rounding passes, every mistake is told, with where it is and why."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_accum as ja
from jax_accum.testing import assert_same_gradient

A = 4
EXAMPLES = 24


def model(params, x):
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return hidden @ params["out"]["kernel"] * params["temperature"]


def loss(params, batch):
    return ja.losses.softmax_cross_entropy(model(params, batch["x"]), batch["y"])


def draw(dtype):
    random = np.random.default_rng(3)
    params = {
        "in": {"kernel": random.normal(size=(12, 20)), "bias": random.normal(size=20)},
        "out": {"kernel": random.normal(size=(20, 7))},
        "temperature": np.array(0.7),
    }
    labels = random.integers(0, 7, EXAMPLES)
    labels[:5] = -100  # the first microbatch weighs 1, the others 6
    batch = {"x": random.normal(size=(EXAMPLES, 12)), "y": labels}
    # Values that float32 holds, so that both precisions are about the same problem.
    single = jax.tree.map(lambda a: np.asarray(a, np.float32), (params, batch["x"]))
    params, batch["x"] = jax.tree.map(lambda a: np.asarray(a, dtype), single)
    return params, batch


def undivided(dtype):
    params, batch = draw(dtype)

    def mean(params):
        return loss(params, batch).mean

    return jax.tree.map(np.asarray, jax.jit(jax.grad(mean))(params))


def parts(weighted):
    """The gradient of every microbatch, of its sum or of its mean, and the weights."""
    params, batch = draw(np.float32)

    def value(params, part):
        return loss(params, part).total if weighted else loss(params, part).mean

    gradient = jax.jit(jax.grad(value))
    grads, weights = [], []
    for rows in np.split(np.arange(EXAMPLES), A):
        part = {"x": batch["x"][rows], "y": batch["y"][rows]}
        grads.append(jax.tree.map(np.asarray, gradient(params, part)))
        weights.append(int(np.sum(part["y"] != -100)))
    return grads, weights


def add(trees):
    return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype=np.float32), *trees)


def scale(tree, by):
    return jax.tree.map(lambda leaf: leaf * np.asarray(by, leaf.dtype), tree)


@pytest.fixture(scope="module")
def reference():
    with jax.enable_x64(True):
        return undivided(np.float64)


@pytest.fixture(scope="module")
def want():
    return undivided(np.float32)


@pytest.fixture(scope="module")
def sums():
    return parts(weighted=True)


@pytest.fixture(scope="module")
def right(sums):
    grads, weights = sums
    return scale(add(grads), 1 / sum(weights))


def message(*args, **kwargs):
    with pytest.raises(AssertionError) as raised:
        assert_same_gradient(*args, **kwargs)
    return str(raised.value)


def test_an_accumulated_gradient_passes_with_and_without_a_reference(right, want, reference):
    assert_same_gradient(right, want, reference)
    assert_same_gradient(right, right, reference, undivided=want, want_undivided=want)
    assert_same_gradient(right, want)
    with pytest.raises(AssertionError):  # they are not bitwise equal: rounding was judged
        jax.tree.map(np.testing.assert_array_equal, right, want)


def test_the_group_gradient_of_the_library_passes(reference, want):
    params, batch = draw(np.float32)
    _, grads = ja.accumulated_value_and_grad(loss, A)(params, batch)
    assert_same_gradient(grads, want, reference)


def test_float64_gradients_may_be_1e_12_apart(reference):
    assert_same_gradient(scale(reference, 1 + 5e-13), reference, reference)
    assert_same_gradient(scale(reference, 1 + 5e-13), reference)
    message(scale(reference, 1 + 2e-12), reference, reference)
    message(scale(reference, 1 + 2e-12), reference)


@pytest.mark.parametrize("with_reference", [True, False], ids=["reference", "no reference"])
@pytest.mark.parametrize("name", ["in/kernel", "in/bias", "out/kernel", "temperature"])
def test_one_parameter_off_by_1e_4_is_named(name, with_reference, right, want, reference):
    wrong = {**right, "in": dict(right["in"]), "out": dict(right["out"])}
    *parent, leaf = name.split("/")
    node = wrong[parent[0]] if parent else wrong
    node[leaf] = node[leaf] * np.float32(1 + 1e-4)
    said = message(wrong, want, reference if with_reference else None)
    assert said.splitlines()[-1].split()[0] == name
    assert "1 of 4 parameters" in said


def test_a_mean_of_means_has_no_constant_ratio(want, reference):
    grads, _ = parts(weighted=False)
    said = message(scale(add(grads), 1 / A), want, reference, microbatches=A)
    assert "differs from entry to entry" in said
    assert "mean of means" in said


def test_a_lost_microbatch_is_told(sums, want, reference):
    grads, weights = sums
    message(scale(add(grads[1:]), 1 / sum(weights)), want, reference)


@pytest.mark.parametrize(
    ("ratio", "given", "cause"),
    [
        (4, {"microbatches": 4}, "not divided by the number of microbatches (A = 4)"),
        (1 / 4, {"microbatches": 4}, "divided by the number of microbatches twice (1/A, A = 4)"),
        (2, {"microbatches": 4, "replicas": 2}, "summed over the replicas instead of averaged"),
        (1 / 2, {"replicas": 2}, "averaged over the replicas, though divided by the whole weight"),
        (1 / 8, {"microbatches": 4, "replicas": 2}, "by microbatches and replicas twice"),
        (19, {"weights": [1, 6, 6, 6]}, "not divided by the group's whole weight (19)"),
        (
            19 / 6,
            {"weights": np.array([[1, 6], [6, 6]])},
            "divided by the weight of one microbatch (6) instead",
        ),
        (19 / 4, {"weights": [1, 6, 6, 6]}, "divided by the number of microbatches (4) instead"),
        (1024, {"factors": {"loss scale": 1024}}, "multiplied by loss scale (1024)"),
        (-4, {"microbatches": 4}, "the sign turned"),
        (-1, {}, "the sign is turned"),
        (0, {}, "the gradient is 0"),
        (8, {}, "not divided by 8: a number of microbatches"),
        (1 / 3, {}, "divided once too often by 3"),
        (1.37, {"microbatches": 4}, "No number that is known"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
@pytest.mark.parametrize("with_reference", [True, False], ids=["reference", "no reference"])
def test_a_constant_ratio_names_its_cause(
    ratio, given, cause, with_reference, right, want, reference
):
    said = message(scale(right, ratio), want, reference if with_reference else None, **given)
    assert cause in said
    assert f"{ratio:.6g} times" in said


def test_the_error_is_shown_beside_the_rounding_of_the_framework_itself(want, reference):
    # Rounding of bfloat16 where float32 should be: 2^-9 is some 2^15 times 2^-24.
    coarse = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(np.float32), want)
    said = message(coarse, want, reference)
    over_own = float(next(line for line in said.splitlines() if "out/kernel" in line).split()[-1])
    assert 2**11 < over_own < 2**16


def test_a_want_that_is_wrong_itself_is_no_yardstick(right, reference):
    wrong = scale(right, 1.05)
    said = message(wrong, wrong, reference)
    assert "want is not the same gradient" in said
    assert "undivided is not the same" in message(right, right, reference, undivided=wrong)


def test_a_finer_want_does_not_narrow_what_float32_may_be_off(right, reference):
    # Eight units in the last place: over the four that always pass, within 4 u √61.
    assert_same_gradient(scale(right, 1 + 2.0**-20), reference, reference)
    message(scale(right, 1 + 1e-4), reference, reference)


def test_a_coarser_computation_may_be_further_off(want, reference):
    coarse = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(np.float32), want)
    message(coarse, coarse, reference)
    assert_same_gradient(coarse, coarse, reference, computed_in="bfloat16")
    assert_same_gradient(coarse, want, computed_in=jnp.bfloat16)


def test_more_summands_let_the_gradient_be_further_off_where_sizes_are_all_there_is(want):
    off = scale(want, 1 + 1e-5)
    message(off, want)
    assert_same_gradient(off, want, summands=10_000)


def test_a_parameter_far_smaller_than_the_tree_is_measured_against_the_tree():
    exact = {"large": np.full(100, 1.0), "tiny": np.full(100, 1e-10)}
    want = jax.tree.map(np.float32, exact)
    noise = {"large": want["large"], "tiny": -want["tiny"]}
    assert_same_gradient(noise, want, exact)
    assert "tiny" in message({**want, "tiny": np.full(100, 1e-7, np.float32)}, want, exact)


def test_one_entry_that_was_exact_by_luck_does_not_narrow_the_rule():
    exact = {"kernel": np.full((64, 64), 1 / 3), "scale": np.array(1.0)}
    want = {"kernel": np.full((64, 64), 1 / 3, np.float32), "scale": np.float32(1)}
    off = {"kernel": want["kernel"], "scale": np.float32(1 + 1.5e-6)}
    assert_same_gradient(off, want, exact)
    message({**off, "scale": np.float32(1 + 1e-5)}, want, exact)


def test_complex_gradients_are_compared_whole():
    exact = {"a": np.exp(1j * np.arange(40.0))}
    want = {"a": exact["a"].astype(np.complex64)}
    assert_same_gradient(want, want, exact)
    assert "differs" in message({"a": want["a"].real.astype(np.complex64)}, want, exact)


def test_a_gradient_that_should_be_zero_has_to_be():
    zero = {"a": np.zeros(30, np.float32)}
    assert_same_gradient(zero, zero, {"a": np.zeros(30)})
    message({"a": np.full(30, 1e-30, np.float32)}, zero)


def test_nan_is_placed_and_never_the_same(right, want, reference):
    bad = {**right, "out": {"kernel": np.where(np.arange(7) == 2, np.nan, right["out"]["kernel"])}}
    bad["out"]["kernel"] = bad["out"]["kernel"].astype(np.float32)
    for args in ((bad, want, reference), (bad, want), (bad, bad)):
        assert "got is not finite, first at out/kernel (20 of 140 entries)" in message(*args)
    assert "want is not finite" in message(right, bad, reference)


def test_flat_names_and_nested_ones_are_the_same(right, want):
    flat = {"in/kernel": right["in"]["kernel"], "in/bias": right["in"]["bias"]}
    assert_same_gradient(flat, {"in": want["in"]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: g.pop("temperature"), "got lacks temperature"),
        (lambda g: g.update(extra=np.ones(2)), "got alone has extra"),
        (lambda g: g.update(temperature={"value": g["temperature"]}), r"nnx.to_pure_dict"),
        (lambda g: g["out"].update(kernel=g["out"]["kernel"].T), "shape (7, 20) in got"),
    ],
    ids=["missing", "left over", "a state of NNX", "transposed"],
)
def test_gradients_of_other_parameters_are_not_the_same(change, words, right, want):
    other = {**right, "out": dict(right["out"])}
    change(other)
    assert words in message(other, want)


@pytest.mark.parametrize(
    ("error", "words", "args", "kwargs"),
    [
        (ValueError, "got holds no array", ({}, {}), {}),
        (TypeError, "got holds dtype <U1 at a", ({"a": "x"}, {"a": 1.0}), {}),
        (TypeError, "want holds dtype object at a", ({"a": 1.0}, {"a": object()}), {}),
        (ValueError, "twice", ({"a": {"b": 1.0}, "a/b": 1.0}, {"a/b": 1.0}), {}),
        (
            ValueError,
            "reference is float32 at a",
            ({"a": 1.0},) * 2,
            {"reference": {"a": np.float32(1)}},
        ),
        (ValueError, "reference is not finite", ({"a": 1.0},) * 2, {"reference": {"a": np.inf}}),
        (ValueError, "reference lacks a", ({"a": 1.0},) * 2, {"reference": {"b": 1.0}}),
        (ValueError, "none is given", ({"a": 1.0},) * 2, {"undivided": {"a": 1.0}}),
        (ValueError, "undivided lacks a", ({"a": 1.0},) * 2, {"undivided": {"b": 1.0}}),
        (ValueError, "microbatches", ({"a": 1.0},) * 2, {"microbatches": 0}),
        (ValueError, "replicas", ({"a": 1.0},) * 2, {"replicas": -1}),
        (ValueError, "weights", ({"a": 1.0},) * 2, {"weights": [-1.0]}),
        (ValueError, "factors", ({"a": 1.0},) * 2, {"factors": {"s": 0.0}}),
        (ValueError, "summands", ({"a": 1.0},) * 2, {"summands": -1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_told_apart_from_a_difference(error, words, args, kwargs):
    with pytest.raises(error, match=words):
        assert_same_gradient(*args, **kwargs)

"""The group gradient on one device: terms, weights, skips, padding, against a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_accum as ja
from tests.programs import model

MICROBATCHES = (1, 2, 4, 8)


def accumulated(loss_fn, microbatches, **options):
    return jax.jit(ja.accumulated_value_and_grad(loss_fn, microbatches, **options))


def linear(w, batch):
    """A loss whose gradient per example is in the data: total w * g, weight as given."""
    return ja.Weighted(w * jnp.sum(batch["g"]), jnp.sum(batch["weight"]))


def test_512_tokens_at_loss_2_and_1536_at_loss_4_are_3_and_a_half():
    batch = {"g": np.float32([512 * 2, 1536 * 4]), "weight": np.float32([512, 1536])}
    (loss, info), grad = accumulated(linear, 2)(jnp.float32(1), batch)
    assert (loss, grad) == (3.5, 3.5)
    assert (info.terms["loss"], info.weights["loss"]) == (7168, 2048)


def test_two_replicas_of_two_microbatches_share_one_denominator():
    # Rows of a replica lie together; tokens (1, 3) and (2, 10), gradients (1, 2) and (3, 4).
    batch = {"g": np.float32([[1], [6], [6], [40]]), "weight": np.float32([[1], [3], [2], [10]])}
    parts = jax.tree.map(lambda x: x.reshape(2, 2, 1), batch)
    fn = ja.accumulated_value_and_grad(linear, 2, axis_name="replica")
    (loss, info), grad = jax.vmap(fn, in_axes=(None, 0), axis_name="replica")(jnp.float32(1), parts)
    assert grad.tolist() == [3.3125, 3.3125]
    assert loss.tolist() == [3.3125, 3.3125]
    assert info.weights["loss"].tolist() == [16, 16]
    assert info.counts["microbatches"].tolist() == [4, 4]


def masked_norm(w, batch):
    """A norm without a guard: where nothing is supervised its gradient is 0 times infinity."""
    norm = jnp.sqrt(jnp.sum(batch["mask"] * jnp.exp(w * batch["x"])))
    return ja.Weighted(norm, jnp.sum(batch["mask"]))


# A mask of numbers: one of booleans XLA turns into a select, and the NaN is gone.
MASKED = {"x": np.float32([1, 2, 3, 4]), "mask": np.float32([1, 1, 0, 0])}


@pytest.mark.parametrize("first", [False, True], ids=["ignored last", "ignored first"])
def test_an_ignored_microbatch_beside_a_valid_one_contributes_nothing_though_it_holds_nan(first):
    batch = jax.tree.map(lambda x: np.roll(x, 2), MASKED) if first else MASKED
    (loss, info), grad = accumulated(masked_norm, 2)(jnp.float32(0.5), batch)
    norm = lambda w: jnp.sqrt(jnp.exp(w) + jnp.exp(2 * w)) / 2  # noqa: E731
    want = jax.value_and_grad(norm)(jnp.float32(0.5))
    np.testing.assert_allclose((loss, grad), want, rtol=1e-6)
    assert info.weights["loss"] == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["zero last", "zero first"])
def test_a_term_without_weight_in_one_microbatch_does_not_poison_the_others(order):
    def loss_fn(w, batch):
        other = ja.Weighted(jnp.sum(w**2 * batch["x"]), batch["x"].size)
        return {"norm": masked_norm(w, batch), "other": other}

    batch = jax.tree.map(lambda x: np.concatenate([x, x[:2]]).reshape(3, 2)[list(order)], MASKED)
    (loss, info), grad = accumulated(loss_fn, None)(jnp.float32(0.5), batch)

    def want(w):
        return 2 * jnp.sqrt(jnp.exp(w) + jnp.exp(2 * w)) / 4 + w**2 * 13 / 6

    np.testing.assert_allclose((loss, grad), jax.value_and_grad(want)(0.5), rtol=1e-6)
    assert info.weights == {"norm": 4, "other": 6}


def test_a_term_without_weight_in_the_whole_group_adds_nothing():
    def loss_fn(w, batch):
        return {"norm": masked_norm(w, batch), "other": ja.Weighted(w**2, 1)}

    batch = MASKED | {"mask": np.zeros(4, np.float32)}
    (loss, info), grad = accumulated(loss_fn, 2)(jnp.float32(3), batch)
    assert (loss, grad) == (9, 6)
    assert info.weights == {"norm": 0, "other": 2}


def test_a_group_with_nothing_supervised_has_loss_and_gradient_0():
    batch = MASKED | {"mask": np.zeros(4, np.float32)}
    (loss, info), grad = accumulated(masked_norm, 2)(jnp.float32(3), batch)
    assert (loss, grad, info.weights["loss"]) == (0, 0, 0)
    assert info.counts["computed"] == 0


def nearest(got, params, batch, loss):
    """How far from float64, in distances of the undivided gradient of the same type."""
    exact = jax.tree.map(np.float64, params)
    with jax.enable_x64(True):
        want = jax.jit(jax.grad(loss))(exact, batch)
    same = model.distance(jax.jit(jax.grad(loss))(params, batch), want)
    return model.distance(got, want) / max(same, float(np.finfo(np.float32).eps))


def test_label_smoothing_and_z_loss_do_not_depend_on_the_number_of_microbatches():
    smoothing, z = 0.2, 1e-2
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 5)).astype(np.float32)
    batch = {"x": rng.normal(size=(16, 4)).astype(np.float32), "y": rng.integers(0, 5, 16)}
    batch["y"][[1, 4, 5]] = -100

    def loss_fn(w, batch):
        return ja.losses.softmax_cross_entropy(
            batch["x"] @ w, batch["y"], label_smoothing=smoothing, z_loss=z
        )

    def loss(w, batch):
        x = batch["x"] @ w
        log_z = jax.nn.logsumexp(x, axis=-1)
        log_p = x - log_z[:, None]
        some = batch["y"] >= 0
        picked = jnp.take_along_axis(log_p, jnp.where(some, batch["y"], 0)[:, None], -1)[:, 0]
        each = -(1 - smoothing) * picked - smoothing * log_p.mean(-1) + z * log_z**2
        return jnp.where(some, each, 0).sum() / 13

    for a in MICROBATCHES:
        _, grads = accumulated(loss_fn, a)(w, batch)
        assert nearest(grads, w, batch, loss) <= 4, a


@pytest.mark.parametrize("a", MICROBATCHES)
def test_a_router_term_of_identical_microbatches_has_the_same_gradient(a):
    def loss_fn(w, batch):
        router = jax.nn.softmax(batch["x"] @ w).mean(0)  # not additive: once per microbatch
        tokens = ja.losses.softmax_cross_entropy(batch["x"] @ w, batch["y"])
        return {"tokens": tokens, "router": ja.Weighted(jnp.sum(router**2), 1)}

    rng = np.random.default_rng(0)
    one = {"x": rng.normal(size=(3, 4)).astype(np.float32), "y": np.array([0, -100, 1])}
    batch = jax.tree.map(lambda x: np.concatenate([x] * a), one)
    w = rng.normal(size=(4, 2)).astype(np.float32)
    _, grad = accumulated(loss_fn, a, coefficients={"router": 0.5})(w, batch)
    _, want = accumulated(loss_fn, 1, coefficients={"router": 0.5})(w, one)
    np.testing.assert_allclose(grad, want, rtol=2e-6)


def test_repeated_tokens_in_an_embedding_have_the_gradient_of_the_undivided_batch():
    params, batch = model.init(), model.rows(8)
    batch["tokens"][:] = batch["tokens"][:1, :1]  # one token everywhere
    fn = accumulated(model.loss_fn, 4, coefficients=model.COEFFICIENTS)
    _, grads = fn(params, batch)
    assert nearest(grads, params, batch, model.undivided) <= 4
    used = np.abs(np.asarray(grads["embedding"])).sum(1) > 0
    assert used.sum() == 1


def test_one_microbatch_is_the_gradient_itself_bit_for_bit():
    def loss_fn(params, batch):
        return model.loss_fn(params, batch)["labels"]

    def plain(params, batch):
        term = loss_fn(params, batch)
        return term.total * (1 / term.weight.astype(jnp.float32))

    params, batch = model.init(), model.rows(8)
    _, got = accumulated(loss_fn, 1)(params, batch)
    want = jax.jit(jax.grad(plain))(params, batch)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, want))


def test_complex_parameters_keep_their_imaginary_part():
    def loss_fn(z, batch):
        return ja.Weighted(jnp.sum(jnp.abs(z * batch - 1) ** 2), batch.size)

    z, batch = jnp.complex64(1 + 2j), np.complex64([1, 1j, 2, 3])
    _, got = accumulated(loss_fn, 2)(z, batch)
    np.testing.assert_allclose(
        got, jax.grad(lambda z: jnp.mean(jnp.abs(z * batch - 1) ** 2))(z), rtol=1e-6
    )


def test_257_bfloat16_ones_are_summed_in_float32():
    # Summed in bfloat16, 256 + 1 is 256. The weights sum to 256, whose reciprocal is exact.
    def loss_fn(w, batch):
        return ja.Weighted(jnp.sum((w * batch["x"]).astype(jnp.float32)), jnp.sum(batch["weight"]))

    weight = np.ones(257, np.float32)
    weight[:2] = 0.5
    batch = {"x": np.ones(257, np.float32).astype(jnp.bfloat16), "weight": weight}
    _, grad = accumulated(loss_fn, 257, accumulator_dtype=jnp.float32)(jnp.bfloat16(1), batch)
    assert (grad, grad.dtype) == (257 / 256, jnp.float32)
    _, own_type = accumulated(loss_fn, 257)(jnp.bfloat16(1), batch)
    assert own_type.dtype == jnp.bfloat16


def test_padding_microbatches_are_not_computed_and_do_not_recompile():
    computed, traced = [], []

    def loss_fn(w, batch):
        traced.append(1)
        jax.debug.callback(lambda x: computed.append(int(x)), batch["id"][0])
        return ja.Weighted(jnp.sum(w * batch["x"] * batch["real"]), jnp.sum(batch["real"]))

    fn = accumulated(loss_fn, 4)
    batch = {"x": np.float32([1, 2, 3, 4]), "id": np.arange(4), "real": np.ones(4, np.float32)}
    _, full = fn(jnp.float32(1), batch)
    jax.effects_barrier()
    assert sorted(computed) == [0, 1, 2, 3]
    times = len(traced)
    computed.clear()
    (_, info), short = fn(jnp.float32(1), batch | {"real": np.float32([1, 1, 0, 0])})
    jax.effects_barrier()
    assert sorted(computed) == [0, 1]
    assert (full, short) == (2.5, 1.5)
    assert info.counts == {"microbatches": 2, "computed": 2}
    assert (fn._cache_size(), len(traced)) == (1, times)


def test_a_padded_copy_of_an_example_has_no_weight_and_is_not_counted_twice():
    batch = {"g": np.float32([1, 2, 3, 4, 5, 1]), "weight": np.float32([1, 1, 1, 1, 1, 0])}

    def loss_fn(w, part):
        return ja.Weighted(w * jnp.sum(part["g"] * part["weight"]), jnp.sum(part["weight"]))

    parts = jax.tree.map(lambda x: x.reshape(2, 3), batch)
    fn = ja.accumulated_value_and_grad(loss_fn, 3, axis_name="replica")
    (_, info), grad = jax.vmap(fn, in_axes=(None, 0), axis_name="replica")(jnp.float32(1), parts)
    assert grad.tolist() == [3, 3]
    assert info.weights["loss"].tolist() == [5, 5]
    assert info.counts["microbatches"].tolist() == [5, 5]


def test_the_loss_scale_multiplies_the_gradient_and_not_the_loss():
    batch = {"g": np.float32([1, 2]), "weight": np.float32([1, 1])}
    fn = accumulated(linear, 2)
    (loss, _), grad = fn(jnp.float32(1), batch, loss_scale=jnp.float32(8))
    assert (loss, grad) == (1.5, 12)


def test_the_norm_is_that_of_the_gradient():
    params, batch = model.init(), model.rows(8)
    fn = accumulated(model.loss_fn, 4, coefficients=model.COEFFICIENTS, grad_norm=True)
    (_, info), grads = fn(params, batch)
    np.testing.assert_allclose(info.grad_norm, optax.tree.norm(grads), rtol=1e-6)

"""The chunked next-token loss is the plain one, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_accum as ja

B, T, C, V = 3, 11, 5, 13

OPTIONS = {
    "nothing but tokens": {},
    "a mask, 0 and 1": {"mask": np.arange(T)[None] < np.array([[11], [4], [1]])},
    "packed rows": {"segment_ids": np.array([[1] * 4 + [2] * 5 + [0] * 2] * B)},
    "an ignored token": {"ignore_index": 3},
    "smoothing and z-loss": {"label_smoothing": 0.2, "z_loss": 0.3},
}
CUTS = {"3 over the sequence": ("sequence", 3), "4 over the vocabulary": ("vocabulary", 4)}
EXTREMES = [("sequence", 1), ("sequence", 10), ("vocabulary", 1), ("vocabulary", 13)]
CASES = [
    pytest.param(*cut, options, id=f"{cut_name}, {name}")
    for cut_name, cut in CUTS.items()
    for name, options in OPTIONS.items()
] + [
    pytest.param(over, chunks, OPTIONS["smoothing and z-loss"], id=f"{chunks} over the {over}")
    for over, chunks in EXTREMES
]


def problem(dtype, seed=0):
    random = np.random.default_rng(seed)
    params = {
        "hidden": 3 * random.standard_normal((B, T, C)),
        "head": random.standard_normal((C, V)),
        "bias": random.standard_normal(V),
    }
    tokens = jnp.asarray(random.integers(0, V, (B, T)))
    return {name: jnp.asarray(x, dtype) for name, x in params.items()}, tokens


def plain(params, tokens, **options):
    logits = params["hidden"] @ params["head"] + params["bias"]
    return ja.losses.next_token_cross_entropy(logits, tokens, **options)


def chunked(params, tokens, **options):
    return ja.losses.chunked_next_token_cross_entropy(
        params["hidden"], params["head"], tokens, bias=params["bias"], **options
    )


def total_and_gradient(loss, params, tokens, **options):
    return jax.jit(jax.value_and_grad(lambda p: loss(p, tokens, **options).total))(params)


def distance(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    off = sum(
        float(jnp.sum((jnp.asarray(g, float) - w) ** 2)) for g, w in zip(got, want, strict=True)
    )
    return (off / sum(float(jnp.sum(w**2)) for w in want)) ** 0.5


@pytest.mark.parametrize(("over", "chunks", "options"), CASES)
def test_loss_gradient_and_weight_are_those_of_the_plain_loss(x64, over, chunks, options):
    params, tokens = problem(jnp.float64)
    want = total_and_gradient(plain, params, tokens, **options)
    got = total_and_gradient(chunked, params, tokens, over=over, chunks=chunks, **options)
    assert distance(got, want) < 1e-13  # a few dozen roundings of 1e-16
    weight = chunked(params, tokens, over=over, chunks=chunks, **options).weight
    assert weight == plain(params, tokens, **options).weight > 0
    assert weight.dtype == jnp.int32


@pytest.mark.parametrize(("over", "chunks"), CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_narrow_types_it_is_as_near_to_float64_as_the_plain_loss(x64, over, chunks, dtype):
    params, tokens = problem(dtype, seed=1)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    oracle = total_and_gradient(plain, wide, tokens)
    own = distance(total_and_gradient(plain, params, tokens), oracle)
    got = total_and_gradient(chunked, params, tokens, over=over, chunks=chunks)
    assert got[0].dtype == jnp.float32
    assert all(g.dtype == jnp.dtype(dtype) for g in jax.tree.leaves(got[1]))
    assert 0 < distance(got, oracle) <= 4 * own


@pytest.mark.parametrize("over", ["sequence", "vocabulary"])
def test_logits_far_from_zero_neither_overflow_nor_vanish(over):
    params, tokens = problem(jnp.float32)
    params["bias"] = params["bias"].at[0].add(1e4).at[12].add(-1e4)
    total, grads = total_and_gradient(chunked, params, tokens, over=over, chunks=4)
    want, _ = total_and_gradient(plain, params, tokens)
    assert jnp.isclose(total, want, rtol=1e-6)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("over", ["sequence", "vocabulary"])
def test_nan_where_nothing_is_supervised_stays_out_of_loss_and_gradient(over):
    params, tokens = problem(jnp.float32)
    mask = jnp.ones((B, T)).at[1, 4].set(0)
    clean = total_and_gradient(chunked, params, tokens, mask=mask, over=over, chunks=3)
    params["hidden"] = params["hidden"].at[1, 3].set(jnp.nan)  # predicts token 4 of row 1
    got = total_and_gradient(chunked, params, tokens, mask=mask, over=over, chunks=3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
        assert jnp.array_equal(a, b)


@pytest.mark.parametrize("over", ["sequence", "vocabulary"])
def test_a_supervised_label_outside_the_vocabulary_makes_the_total_nan(over):
    params, tokens = problem(jnp.float32)
    loss = chunked(params, tokens.at[0, 2].set(V), over=over, chunks=3)
    assert jnp.isnan(loss.total)
    assert loss.weight == B * (T - 1)


@pytest.mark.parametrize("over", ["sequence", "vocabulary"])
def test_sixteen_chunks_take_an_eighth_of_the_memory_or_less(over):
    rows, length, width, vocabulary = 4, 65, 4, 4096
    shapes = {
        "hidden": jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
        "head": jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
        "bias": jax.ShapeDtypeStruct((vocabulary,), jnp.float32),
    }
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def temporary(loss, **options):
        def total(params, tokens):
            return loss(params, tokens, **options).total

        return ja.memory.analyze(jax.jit(jax.grad(total)), shapes, tokens).temporary

    logits = 4 * rows * (length - 1) * vocabulary
    # The plain loss holds logits, exponentials and a gradient at once.
    assert temporary(plain) > 2 * logits
    assert temporary(chunked, over=over, chunks=16) < temporary(plain) / 8


def test_in_a_training_step_its_weight_is_found_without_the_model():
    params, tokens = problem(jnp.float32)
    trained = {name: params[name] for name in ("head", "bias")}

    def loss_fn(trained, batch):
        hidden, tokens = batch
        return chunked({**trained, "hidden": hidden}, tokens, chunks=3)

    fn = jax.jit(ja.accumulated_value_and_grad(loss_fn, 3))
    (loss, info), _ = fn(trained, (params["hidden"], tokens))
    whole = plain(params, tokens)
    assert info.weights["loss"] == whole.weight
    assert jnp.isclose(loss, whole.mean, rtol=1e-6)


BAD = {
    "hidden must be floating": {"hidden": jnp.ones((B, T, C), int)},
    "hidden must be": {"hidden": jnp.ones((B, T, C + 1))},
    "tokens must be integers": {"tokens": jnp.ones((B, T))},
    "tokens must have shape": {"tokens": jnp.ones((B, T + 1), int)},
    "a row needs two tokens": {"hidden": jnp.ones((B, 1, C)), "tokens": jnp.ones((B, 1), int)},
    "bias must have shape": {"bias": jnp.ones(V + 1)},
    "mask must have shape": {"mask": jnp.ones((B, T - 1))},
    "segment_ids must have shape": {"segment_ids": jnp.ones((B, T - 1), int)},
    "over must be": {"over": "rows"},
    "chunks must be at least 1": {"chunks": 0},
    "chunks=11 is more than the 10": {"chunks": 11},
    "chunks=14 is more than the 13": {"chunks": 14, "over": "vocabulary"},
    "label_smoothing must lie": {"label_smoothing": 1.5},
    "z_loss must be": {"z_loss": -1.0},
}


@pytest.mark.parametrize(("message", "given"), BAD.items(), ids=BAD)
def test_bad_input_is_named(message, given):
    params, tokens = problem(jnp.float32)
    arguments = {**params, "tokens": tokens, "chunks": 2, **given}
    with pytest.raises((TypeError, ValueError), match=message):
        ja.losses.chunked_next_token_cross_entropy(**arguments)

"""Maps of the usual layers: both sides compute the same from mapped weights, in float64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from jax_accum.crosscheck import layer_maps
from jax_accum.crosscheck.rules import RuleMap, named_arrays, rebuilt

C, H = 6, 2
X = np.random.default_rng(0).standard_normal((2, 5, C))
IMAGES = np.random.default_rng(1).standard_normal((2, 7, 8, 3))
TOKENS = np.array([[3, 1, 4], [1, 5, 9]])


def on_linen(layer, *inputs):
    shapes = jax.eval_shape(layer.init, jax.random.key(0), *inputs)["params"]
    return shapes, lambda params, *x: layer.apply({"params": params}, *x)


def on_nnx(make):
    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def run(params, *x):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(*x)

    return nnx.to_pure_dict(state), run


def on_equinox(make):
    params, rest = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, rest))(x)


def channels_last(module):
    return lambda x: module(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def attend(module):
    return lambda x: module(x, x, x, need_weights=False)[0]


def plain_attention(query, key, value, **options):
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def dense(library):
    theirs = torch.nn.Linear(C, 4)
    if library == "linen":
        return on_linen(linen.Dense(4), X), theirs, theirs, X
    if library == "nnx":
        return on_nnx(lambda rngs: nnx.Linear(C, 4, rngs=rngs)), theirs, theirs, X
    made = on_equinox(lambda key: eqx.nn.Linear(C, 4, key=key))
    return made, theirs, theirs, X[:, 0]


def conv(library):
    theirs = torch.nn.Conv2d(3, 4, (3, 2))
    if library == "linen":
        layer = linen.Conv(4, (3, 2), padding="VALID")
        return on_linen(layer, IMAGES), theirs, channels_last(theirs), IMAGES
    if library == "nnx":
        made = on_nnx(lambda rngs: nnx.Conv(3, 4, (3, 2), padding="VALID", rngs=rngs))
        return made, theirs, channels_last(theirs), IMAGES
    made = on_equinox(lambda key: eqx.nn.Conv2d(3, 4, (3, 2), key=key))
    return made, theirs, theirs, IMAGES.transpose(0, 3, 1, 2)


def layer_norm(library):
    theirs = torch.nn.LayerNorm(C, eps=1e-6)
    if library == "linen":
        return on_linen(linen.LayerNorm(), X), theirs, theirs, X
    if library == "nnx":
        return on_nnx(lambda rngs: nnx.LayerNorm(C, rngs=rngs)), theirs, theirs, X
    made = on_equinox(lambda key: eqx.nn.LayerNorm(C, eps=1e-6))
    return made, theirs, theirs, X[:, 0]


def embedding(library):
    theirs = torch.nn.Embedding(10, C)
    if library == "linen":
        return on_linen(linen.Embed(10, C), TOKENS), theirs, theirs, TOKENS
    if library == "nnx":
        return (
            on_nnx(lambda rngs: nnx.Embed(10, C, dtype=jnp.float64, rngs=rngs)),
            theirs,
            theirs,
            TOKENS,
        )
    made = on_equinox(lambda key: eqx.nn.Embedding(10, C, key=key))
    return made, theirs, theirs, TOKENS[:, 0]


def attention(library):
    theirs = torch.nn.MultiheadAttention(C, H, batch_first=True)
    if library == "linen":
        layer = linen.MultiHeadDotProductAttention(H, qkv_features=C)
        shapes, run = on_linen(layer, X)
        return (shapes, run), theirs, attend(theirs), X
    if library == "nnx":
        # NNX hands over to jax.nn.dot_product_attention, which computes in float32.
        wide = {"dtype": jnp.float64, "attention_fn": plain_attention}
        made = on_nnx(lambda rngs: nnx.MultiHeadAttention(H, C, decode=False, **wide, rngs=rngs))
        return made, theirs, attend(theirs), X
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    shapes, run = on_equinox(lambda key: eqx.nn.MultiheadAttention(H, C, key=key, **biases))
    _, rest = eqx.partition(
        eqx.nn.MultiheadAttention(H, C, key=jax.random.key(0), **biases), eqx.is_inexact_array
    )
    run = lambda params, x: jax.vmap(lambda row: eqx.combine(params, rest)(row, row, row))(x)  # noqa: E731
    return (shapes, run), theirs, attend(theirs), X


@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
@pytest.mark.parametrize("layer", [dense, conv, layer_norm, embedding, attention])
def test_a_mapped_layer_computes_the_same_on_both_sides(layer, library):
    with jax.enable_x64(True):
        (tree, run), module, forward, inputs = layer(library)
        sizes = {path: leaf.shape for path, leaf in _leaves(tree).items()}
        module = module.double()
        names = {name: tuple(p.shape) for name, p in module.named_parameters()}
        rules = getattr(layer_maps, layer.__name__)("", "", library=library)
        mapping = RuleMap(rules, sizes, names)
        random = np.random.default_rng(2)
        arrays = {path: random.standard_normal(shape) for path, shape in sizes.items()}
        params = rebuilt(tree, {path: jnp.asarray(array) for path, array in arrays.items()})
        ours = np.asarray(run(params, jnp.asarray(inputs)))
    with torch.no_grad():
        for name, array in mapping.to_torch(arrays).items():
            module.get_parameter(name).copy_(torch.from_numpy(array))
        theirs = forward(torch.from_numpy(inputs)).numpy()
    assert ours.dtype == theirs.dtype == np.float64
    assert np.linalg.norm(ours - theirs) <= 1e-13 * np.linalg.norm(theirs)


def _leaves(tree):
    made = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.int8), tree)
    return named_arrays(made)


def test_four_linear_layers_serve_as_the_projections_of_an_attention():
    rules = layer_maps.attention("a", "b", projections=("q", "k", "v", "o"))
    sizes = {f"a/{n}/kernel": (C, H, 3) for n in ("query", "key", "value")}
    sizes |= {f"a/{n}/bias": (H, 3) for n in ("query", "key", "value")}
    sizes |= {"a/out/kernel": (H, 3, C), "a/out/bias": (C,)}
    names = {f"b.{n}.weight": (6, 6) for n in "qkvo"} | {f"b.{n}.bias": (6,) for n in "qkvo"}
    assert (
        len(RuleMap(rules, sizes, names).to_torch({p: np.ones(s) for p, s in sizes.items()})) == 8
    )


def test_an_unknown_library_is_named():
    with pytest.raises(ValueError, match="'linen', 'nnx' or 'equinox', got 'haiku'"):
        layer_maps.dense("a", "b", library="haiku")


def test_the_running_variance_of_a_batch_norm_is_translated_to_the_unbiased_one():
    images = IMAGES.astype(np.float32)
    layer = linen.BatchNorm(use_running_average=False, momentum=0.9)
    variables = layer.init(jax.random.key(0), images)
    before = np.asarray(variables["batch_stats"]["var"])
    _, changed = layer.apply(variables, images, mutable=["batch_stats"])
    after = np.asarray(changed["batch_stats"]["var"])
    module = torch.nn.BatchNorm2d(3, momentum=0.1)
    module(torch.from_numpy(images.transpose(0, 3, 1, 2)))
    theirs = module.running_var.numpy()
    count = images[..., 0].size
    made = layer_maps.pytorch_running_variance(before, after, 0.9, count)
    np.testing.assert_allclose(made, theirs, rtol=2**-20)
    assert np.abs(after / theirs - 1).max() > 2**-12  # what is left out without it
    with pytest.raises(ValueError, match="count must be at least 2"):
        layer_maps.pytorch_running_variance(before, after, 0.9, 1)

"""The dense layer of the GPT: the numbers of Flax's, without its transposed copies."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_accum.crosscheck.gpt import Dense

C = 32
SHAPES = [(64, C), (4, 16, C)]


def gradient_of(layer, shape):
    """The compiled gradient by parameters and input, and its value."""
    x, g = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    params = layer.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.sum(jnp.tanh(layer.apply(params, x)) * g)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    return compiled.as_text(), compiled(params, x)


@pytest.mark.parametrize("shape", SHAPES, ids=["rows", "rows and positions"])
def test_it_has_the_parameters_and_gradients_of_flax(shape):
    want, got = gradient_of(nn.Dense(C), shape)[1], gradient_of(Dense(C), shape)[1]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * np.finfo(np.float32).eps)


def test_its_gradient_transposes_nothing_in_memory():
    # Where this fails, XLA has learned it, and Flax's own layer will do.
    assert gradient_of(nn.Dense(C), SHAPES[1])[0].count(" transpose(") > 0
    assert gradient_of(Dense(C), SHAPES[1])[0].count(" transpose(") == 0

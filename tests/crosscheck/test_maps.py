"""The parameter map: both ways, against both models, and what is wrong with a wrong one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_accum.crosscheck.gpt import GPT, GPTSizes, parameter_shapes
from jax_accum.crosscheck.maps import (
    Entry,
    ParameterMap,
    flatten,
    gpt_map,
    initial_weights,
    unflatten,
)
from torch_ref import models as torch_models

SIZES = GPTSizes(vocab_size=13, max_length=7, layers=2, heads=2, width=6)


def torch_model(arrays):
    model = torch_models.GPT(torch_models.GPTConfig(**vars(SIZES)), dtype=torch.float64)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    model.load_state_dict(tensors, strict=True)
    return model


def logits_of_both(mapping):
    weights = initial_weights(parameter_shapes(SIZES), seed=1)
    tokens = np.random.default_rng(0).integers(0, 13, (3, 7))
    with jax.enable_x64(True):
        params = unflatten({path: jnp.asarray(array) for path, array in weights.items()})
        ours = np.asarray(GPT(SIZES).apply({"params": params}, tokens))
    theirs = torch_model(mapping.to_torch(weights))(torch.from_numpy(tokens))
    return ours, theirs.detach().numpy()


def test_both_models_compute_the_same_function_in_float64():
    ours, theirs = logits_of_both(gpt_map(SIZES))
    assert ours.dtype == theirs.dtype == np.float64
    assert np.linalg.norm(ours - theirs) <= 1e-12 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("blocks_0/ln1/scale", "blocks_0/ln2/scale"),
        ("blocks_0/attn/q/kernel", "blocks_0/attn/k/kernel"),
        ("blocks_0/attn/o/bias", "blocks_1/attn/o/bias"),
        ("ln_f/bias", "ln_f/scale"),
    ],
)
def test_two_parameters_that_were_swapped_do_not_go_unseen(one, other):
    swap = {one: other, other: one}
    entries = [Entry(swap.get(e.jax, e.jax), e.torch, e.transposed) for e in gpt_map(SIZES).entries]
    ours, theirs = logits_of_both(ParameterMap(entries))
    assert np.linalg.norm(ours - theirs) > 1e-6 * np.linalg.norm(theirs)


def test_a_map_there_and_back_changes_no_bit():
    mapping, weights = gpt_map(SIZES), initial_weights(parameter_shapes(SIZES), seed=0)
    back = mapping.to_jax(mapping.to_torch(weights))
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[path], weights[path]) for path in weights)


def test_the_map_fits_both_models():
    shapes = {
        n: tuple(p.shape)
        for n, p in torch_models.GPT(torch_models.GPTConfig(**vars(SIZES))).named_parameters()
    }
    mapping = gpt_map(SIZES)
    mapping.check(parameter_shapes(SIZES), shapes)
    assert len(mapping.entries) == len(shapes)


def test_names_without_a_counterpart_are_listed_on_the_side_where_they_are():
    mapping = ParameterMap([Entry("a", "t.a"), Entry("b", "t.b")])
    with pytest.raises(ValueError, match=r"not in the jax parameters: b; .* not mapped: c, d"):
        mapping.check({"a": (1,), "c": (1,), "d": (1,)}, {})
    with pytest.raises(ValueError, match=r"in the torch parameters but not mapped: t\.c"):
        mapping.to_jax({"t.a": np.zeros(1), "t.b": np.zeros(1), "t.c": np.zeros(1)})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Entry("a", "x"), Entry("a", "y")], "the jax name 'a' 2 times"),
        ([Entry("a", "x"), Entry("b", "x")], "the torch name 'x' 2 times"),
    ],
)
def test_a_name_that_is_mapped_twice_is_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        ParameterMap(entries)


def test_shapes_that_do_not_agree_are_named():
    with pytest.raises(ValueError, match=r"k \(2, 3\) maps transposed to \(3, 2\), but w is \(2"):
        ParameterMap([Entry("k", "w", transposed=True)]).check({"k": (2, 3)}, {"w": (2, 3)})


def test_initial_weights_are_the_same_in_float32_and_float64():
    weights = initial_weights(parameter_shapes(SIZES), seed=5)
    for array in weights.values():
        assert array.dtype == np.float64
        assert np.array_equal(array, array.astype(np.float32).astype(np.float64))
        assert np.std(array) > 0


def test_flatten_and_unflatten_are_inverses():
    flat = {"a/b/c": 1, "a/d": 2, "e": 3}
    assert flatten(unflatten(flat)) == flat

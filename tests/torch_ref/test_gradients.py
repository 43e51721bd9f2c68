"""Sums of gradients keep their type, norms are of the whole tree, arrays leave as copies."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from torch_ref.accumulate import accumulate
from torch_ref.gradients import (
    clip_gradients,
    first_nonfinite,
    gradient_norm,
    gradients,
    parameters,
)
from torch_ref.losses import Weighted


@pytest.mark.parametrize(
    ("dtype", "value", "want"),
    [
        (torch.complex64, 1 + 1j, 1 + 1j),
        (torch.float64, 1 + 2.0**-40, 1 + 2.0**-40),
        (torch.bfloat16, 1.0, 1.0),
    ],
    ids=["complex-keeps-its-imaginary-part", "float64-keeps-its-digits", "bfloat16-ones"],
)
def test_the_mean_gradient_keeps_its_type(dtype, value, want) -> None:
    model = nn.ParameterDict({"w": torch.zeros(1, dtype=dtype)})

    def loss_fn(model, x):
        # d Re(conj(x) w) / dw is x in PyTorch's convention.
        return Weighted((x.conj() * model["w"]).real.sum(), torch.tensor(1))

    accumulate(model, loss_fn, [torch.full((1, 1), value, dtype=dtype)] * 2)
    assert model["w"].grad.dtype == dtype
    assert model["w"].grad.item() == want


def test_257_bfloat16_ones_are_summed_in_float32(dot, dot_loss) -> None:
    # Bfloat16 parameters: 257 / 257 is 1; summed in bfloat16 it would be 256 / 257.
    narrow = dot(1, torch.bfloat16)
    accumulate(narrow, dot_loss, [torch.ones(1, 1)] * 257)
    assert narrow.w.grad.item() == 1.0

    # Float32 parameters, bfloat16 computation: what the optimizer sees is 257 itself.
    def bfloat16_loss(model, x):
        return Weighted((x.bfloat16() @ model.w.bfloat16()).sum(), torch.tensor(1))

    wide = dot(1)
    accumulate(wide, bfloat16_loss, [torch.ones(1, 1)] * 257, coefficients={"loss": 257.0})
    assert wide.w.grad.item() == 257.0


def test_denominators_first_keep_large_sums_from_overflowing_float16(dot, dot_loss) -> None:
    # 512 tokens with gradient 256 each sum to 2^17, above float16's largest number, 65504.
    data, model = [torch.full((512, 1), 256.0)] * 2, dot(1, torch.float16)
    accumulate(model, dot_loss, data, denominators="first", weights_fn=len)
    assert model.w.grad.item() == 256.0
    accumulate(model, dot_loss, data)
    assert model.w.grad.item() == math.inf


def test_a_parameter_that_no_example_uses_has_gradient_zero_not_none(dot, dot_loss) -> None:
    model = dot(1)
    model.unused = nn.Parameter(torch.ones(2))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    accumulate(model, dot_loss, [torch.ones(1, 1)])
    assert model.unused.grad.tolist() == [0.0, 0.0]
    assert model.frozen.grad is None


def two_layers(first: list[float], second: list[float], dtype=torch.float32) -> nn.ParameterDict:
    model = nn.ParameterDict({"a": torch.zeros(2, dtype=dtype), "b": torch.zeros(2, dtype=dtype)})
    model["a"].grad = torch.tensor(first, dtype=dtype)
    model["b"].grad = torch.tensor(second, dtype=dtype)
    return model


def test_the_norm_is_of_all_parameters_together() -> None:
    assert gradient_norm(two_layers([1.0, 2.0], [2.0, 4.0])) == 5.0


def test_the_norm_of_float32_gradients_does_not_overflow() -> None:
    assert gradient_norm(two_layers([3e30, 0.0], [0.0, 4e30])) == pytest.approx(5e30, rel=1e-7)


@pytest.mark.parametrize(
    ("limit", "want"), [(1.0, 1.0), (4.999, 4.999), (5.0, 5.0), (7.0, 5.0)], ids=str
)
def test_clipping_reaches_the_limit_to_float64_precision_and_never_enlarges(limit, want) -> None:
    model = two_layers([1.0, 2.0], [2.0, 4.0], torch.float64)
    clip_gradients(model, limit, gradient_norm(model))
    assert gradient_norm(model) == pytest.approx(want, rel=4e-16)


def test_the_first_parameter_with_a_nonfinite_gradient_is_named() -> None:
    assert first_nonfinite(two_layers([1.0, 2.0], [2.0, math.inf])) == "b"
    assert first_nonfinite(two_layers([1.0, math.nan], [2.0, math.inf])) == "a"
    assert first_nonfinite(two_layers([1.0, 2.0], [2.0, 4.0])) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_arrays_are_float32_copies_that_later_updates_do_not_change(dtype) -> None:
    model = two_layers([1.0, 2.0], [2.0, 4.0], dtype)
    weights, grads = parameters(model), gradients(model)
    with torch.no_grad():
        model["a"].add_(1)
        model["a"].grad.add_(1)
    np.testing.assert_array_equal(weights["a"], np.zeros(2, np.float32), strict=True)
    np.testing.assert_array_equal(grads["a"], np.array([1, 2], np.float32), strict=True)

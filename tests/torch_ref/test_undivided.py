"""The reference by itself: a known answer, float64 throughout, and the model left alone."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from torch_ref.losses import Weighted
from torch_ref.undivided import concatenate, undivided


def two_terms(model, batch):
    return {
        "a": Weighted(model(batch["x"]).sum(), torch.tensor(4)),
        "b": Weighted(model(batch["x"]).square().sum(), torch.tensor(2)),
        "none": Weighted(model(batch["x"]).sum() * math.nan, torch.tensor(0)),
    }


def test_terms_have_their_own_denominators_and_coefficients(dot) -> None:
    model = dot(1)
    with torch.no_grad():
        model.w += 3
    result = undivided(
        model, two_terms, {"x": torch.tensor([[1.0], [2.0]])}, coefficients={"b": 0.5}
    )
    assert result.loss == (3 + 6) / 4 + 0.5 * (9 + 36) / 2
    assert result.gradients["w"].tolist() == [3 / 4 + 0.5 * 2 * 3 * (1 + 4) / 2]
    assert result.weights == {"a": 4, "b": 2, "none": 0}


def test_it_computes_in_float64_and_leaves_the_model_and_its_gradient_alone(dot, dot_loss) -> None:
    model = dot(1)
    model.w.grad = torch.tensor([7.0])
    batch = torch.tensor([[1.0], [2.0**-24], [2.0**-24]])
    result = undivided(model, dot_loss, batch)
    assert result.gradients["w"].dtype == np.float64
    assert result.gradients["w"].item() == pytest.approx((1 + 2.0**-23) / 3, rel=1e-15)
    assert (model.w.dtype, model.w.grad.item()) == (torch.float32, 7.0)
    assert undivided(model, dot_loss, batch, dtype=None).gradients["w"].dtype == np.float32


def test_floating_data_is_converted_with_the_model_and_integers_are_not() -> None:
    seen = []

    def loss_fn(model, batch):
        x, label = batch
        seen.append((x.dtype, label.dtype))
        return Weighted(model(x)[label].sum(), torch.tensor(1))

    undivided(nn.Linear(1, 1), loss_fn, (torch.ones(2, 1), torch.tensor([1])))
    assert seen == [(torch.float64, torch.int64)]


def test_parameters_that_the_loss_does_not_reach_have_gradient_zero(dot, dot_loss) -> None:
    model = dot(1)
    model.unused = nn.Parameter(torch.ones(2))
    assert undivided(model, dot_loss, torch.ones(1, 1)).gradients["unused"].tolist() == [0, 0]


def test_nothing_supervised_is_loss_zero_and_gradient_zero(dot) -> None:
    result = undivided(
        dot(1), lambda m, x: Weighted(m(x).sum() * math.nan, torch.tensor(0)), torch.ones(1, 1)
    )
    assert (result.loss, result.gradients["w"].tolist()) == (0.0, [0.0])


def test_microbatches_of_any_structure_are_joined_along_the_first_axis() -> None:
    a = {"x": torch.zeros(2, 3), "y": (torch.zeros(2), torch.zeros(2, 1))}
    b = {"x": torch.ones(1, 3), "y": (torch.ones(1), torch.ones(1, 1))}
    joined = concatenate([a, b])
    assert joined["x"].tolist() == [[0] * 3, [0] * 3, [1] * 3]
    assert joined["y"][0].tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="microbatches is empty"):
        concatenate([])
    with pytest.raises(TypeError, match="microbatches must be tensors"):
        concatenate(["text"])

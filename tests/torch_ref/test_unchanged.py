"""The check that no parameter changes inside a group finds every way of changing one."""

import pytest
import torch
from torch import nn

from torch_ref.accumulate import accumulate
from torch_ref.losses import Weighted
from torch_ref.unchanged import parameters_unchanged


def test_an_update_in_the_middle_of_a_group_is_found_and_named(dot) -> None:
    def loss_fn(model, x):
        if x[0, 0] == 2:
            with torch.no_grad():
                model.w += 1
        return Weighted(model(x.square()).sum(), torch.tensor(1))

    data = [torch.full((1, 1), float(i)) for i in (1, 2, 3)]
    with pytest.raises(RuntimeError, match="'w' changed during microbatch 2 of a group"):
        accumulate(dot(1), loss_fn, data)


def test_a_change_that_version_counters_miss_is_found_at_the_end_of_the_group(dot) -> None:
    def loss_fn(model, x):
        model.w.data[0] = -0.0  # equal to what was there, but other bits
        return Weighted(model(x).sum(), torch.tensor(1))

    with pytest.raises(RuntimeError, match="'w' changed before the end of the group"):
        accumulate(dot(1), loss_fn, [torch.ones(1, 1)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_parameters_of_every_type_shape_and_layout_may_stay_as_they_are(dtype) -> None:
    model = nn.ParameterDict(
        {
            "scalar": torch.ones((), dtype=dtype),
            "empty": torch.ones(0, 3, dtype=dtype),
            "transposed": torch.ones(3, 2, dtype=dtype).T,
        }
    )
    with parameters_unchanged(model) as check:
        check("microbatch 1")
    with (
        pytest.raises(RuntimeError, match="'transposed' changed"),
        parameters_unchanged(model),
    ):
        model["transposed"].data[1, 2] = 0


def test_an_error_inside_the_group_is_not_hidden_by_the_check(dot) -> None:
    def loss_fn(model, x):
        model.w.data += 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        accumulate(dot(1), loss_fn, [torch.ones(1, 1)])

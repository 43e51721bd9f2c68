"""What `accumulate` refuses, and that it says which argument was wrong and why."""

import math

import pytest
import torch

from torch_ref.accumulate import accumulate
from torch_ref.losses import Weighted


def constant(total=1.0, weight=1):
    return lambda m, x: Weighted(m.w.sum() * total, torch.tensor(weight))


BAD_INPUT = {
    "no microbatch": (ValueError, "microbatches is empty", {"microbatches": []}),
    "first without a weights function": (ValueError, "goes with", {"denominators": "first"}),
    "a weights function without first": (ValueError, "goes with", {"weights_fn": len}),
    "reject with denominators first": (
        ValueError,
        "reject needs",
        {"denominators": "first", "weights_fn": len, "reject": bool},
    ),
    "weights that disagree": (
        ValueError,
        "weights_fn counted {'loss': 3}, but loss_fn reported {'loss': 1}",
        {"denominators": "first", "weights_fn": lambda x: 3},
    ),
    "negative weight": (ValueError, "weight of term 'loss' must", {"loss_fn": constant(1, -1)}),
    "weight NaN": (ValueError, "weight of term 'loss' must", {"loss_fn": constant(1, math.nan)}),
    "weight that depends on parameters": (
        ValueError,
        "depends on parameters",
        {"loss_fn": lambda m, x: Weighted(m.w.sum(), m.w.sum() + 1)},
    ),
    "a mean instead of a sum and a weight": (
        TypeError,
        "return a sum and its weight, not a mean",
        {"loss_fn": lambda m, x: m.w.sum()},
    ),
    "a dict of means": (TypeError, "for 'ce'", {"loss_fn": lambda m, x: {"ce": m.w.sum()}}),
    "a total that is no scalar": (
        ValueError,
        "sum it to a scalar",
        {"loss_fn": lambda m, x: Weighted(m.w, torch.tensor(1))},
    ),
    "coefficient of an unknown term": (
        ValueError,
        "coefficients names .'aux'.",
        {"coefficients": {"aux": 1.0}},
    ),
    "terms that come and go": (
        ValueError,
        "return every term",
        {
            "microbatches": [torch.ones(1, 1), torch.ones(2, 1)],
            "loss_fn": lambda m, x: {str(len(x)): Weighted(m.w.sum(), torch.tensor(1))},
        },
    ),
    "a microbatch without tensors": (TypeError, "whose first axis", {"microbatches": [3]}),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_by_name(dot, case) -> None:
    error, says, changed = BAD_INPUT[case]
    arguments = {"loss_fn": constant(), "microbatches": [torch.ones(1, 1)], **changed}
    with pytest.raises(error, match=says):
        accumulate(dot(1), **arguments)

"""The losses against formulas written out in NumPy and against PyTorch's own."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from torch_ref.losses import (
    Weighted,
    next_token_cross_entropy,
    next_token_targets,
    softmax_cross_entropy,
)


def logits_of(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_a_row_of_five_tokens_has_four_targets_each_the_token_after() -> None:
    logits, tokens = logits_of(1, 5, 7), torch.tensor([[3, 1, 4, 1, 5]])
    loss = next_token_cross_entropy(logits, tokens)
    x = logits.numpy()[0]
    want = sum(np.log(np.exp(x[t]).sum()) - x[t, tokens[0, t + 1]] for t in range(4))
    assert loss.weight.item() == 4
    assert loss.total.item() == pytest.approx(want, rel=1e-13)


def test_a_packed_row_equals_its_documents_one_by_one() -> None:
    logits, tokens = logits_of(1, 11, 7), torch.arange(11)[None] * 3 % 7
    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3, 0, 0]])
    packed = next_token_cross_entropy(logits, tokens, segment_ids=segments)
    alone = [
        next_token_cross_entropy(logits[:, a:b], tokens[:, a:b])
        for a, b in [(0, 4), (4, 7), (7, 9)]
    ]
    assert packed.weight.item() == sum(part.weight.item() for part in alone) == 3 + 2 + 1
    assert packed.total.item() == pytest.approx(sum(p.total.item() for p in alone), rel=1e-13)


def test_each_document_boundary_and_padding_takes_away_exactly_its_own_targets() -> None:
    segments = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 0, 0]])
    targets = next_token_targets(torch.ones(1, 9, dtype=torch.long), segment_ids=segments)
    assert targets.int().tolist() == [[1, 1, 0, 1, 0, 1, 0, 0]]


def test_a_mask_says_which_tokens_are_targets() -> None:
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    mask = torch.tensor([[True, False, True, False, True]])
    targets = next_token_targets(tokens, mask=mask)
    assert targets.int().tolist() == [[0, 1, 0, 1]]
    assert torch.equal(next_token_targets(tokens, mask=mask.long()), targets)


def test_tokens_equal_to_the_ignored_value_are_no_targets() -> None:
    tokens = torch.tensor([[3, 0, 4, 0, 0]])
    assert next_token_targets(tokens, ignore_index=0).int().tolist() == [[0, 1, 0, 0]]
    assert next_token_targets(tokens, ignore_index=None).int().tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("poison", [0.0, math.inf, math.nan])
def test_all_ignored_is_zero_with_zero_gradient_whatever_the_logits_hold(poison: float) -> None:
    logits = torch.full((3, 4), poison, requires_grad=True)
    loss = softmax_cross_entropy(logits, torch.full((3,), -100), label_smoothing=0.1, z_loss=0.1)
    loss.total.backward()
    assert (loss.total.item(), loss.weight.item()) == (0.0, 0)
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(3, 4))


def test_an_ignored_position_with_infinite_logits_leaves_its_neighbours_gradient_alone() -> None:
    labels = torch.tensor([1, -100])
    clean = torch.tensor([[1.0, 2, 3], [0, 0, 0]], requires_grad=True)
    dirty = torch.tensor([[1.0, 2, 3], [0, math.inf, 0]], requires_grad=True)
    for logits in (clean, dirty):
        softmax_cross_entropy(logits, labels, label_smoothing=0.1).total.backward()
    assert clean.grad is not None
    assert dirty.grad is not None
    assert torch.equal(clean.grad, dirty.grad)


def test_every_part_of_the_formula_written_out_in_numpy() -> None:
    logits, labels = logits_of(6, 5), torch.tensor([0, 4, -100, 2, 2, 1])
    mask = torch.tensor([True, True, True, False, True, True])
    got = softmax_cross_entropy(logits, labels, mask=mask, label_smoothing=0.1, z_loss=1e-2)
    want = 0.0
    for x, y, supervised in zip(logits.numpy(), labels.tolist(), [1, 1, 0, 0, 1, 1], strict=True):
        if supervised:
            log_z = np.log(np.exp(x).sum())
            want += 0.9 * (log_z - x[y]) + 0.1 * np.mean(log_z - x) + 1e-2 * log_z**2
    assert got.weight.item() == 4
    assert got.total.item() == pytest.approx(want, rel=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
def test_agrees_with_pytorchs_own_sum_and_its_gradient(smoothing: float) -> None:
    logits, labels = logits_of(6, 5).requires_grad_(), torch.tensor([0, 4, -100, 2, 2, 1])
    ours = softmax_cross_entropy(logits, labels, label_smoothing=smoothing).total
    theirs = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    (a,), (b,) = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_narrow_logits_are_computed_in_float32() -> None:
    logits, labels = logits_of(64, 50).bfloat16(), torch.arange(64) % 50
    narrow = softmax_cross_entropy(logits, labels)
    assert narrow.total.dtype == torch.float32
    assert torch.equal(narrow.total, softmax_cross_entropy(logits.float(), labels).total)


def test_the_mean_of_nothing_is_zero_and_so_is_its_gradient() -> None:
    total = torch.tensor(math.nan, requires_grad=True)
    mean = Weighted(total, torch.tensor(0)).mean
    mean.backward()
    assert mean.item() == 0
    assert total.grad is not None
    assert total.grad.item() == 0


L, L3 = logits_of(2, 3), logits_of(2, 5, 3)
TOKENS = torch.ones(2, 5, dtype=torch.long)
CE, NEXT, TARGETS = softmax_cross_entropy, next_token_cross_entropy, next_token_targets
BAD_INPUT = {
    "floating labels": (TypeError, "labels must be integers", lambda: CE(L, torch.ones(2))),
    "integer logits": (TypeError, "logits must be floating", lambda: CE(TOKENS, TOKENS[:, 0])),
    "floating mask": (TypeError, "mask must be bool", lambda: TARGETS(TOKENS, mask=L3[..., 0])),
    "labels of another shape": (ValueError, "labels must have the shape", lambda: CE(L, TOKENS)),
    "label V": (ValueError, "labels must lie in", lambda: CE(L, torch.tensor([0, 3]))),
    "label -1": (ValueError, "labels must lie in", lambda: CE(L, torch.tensor([0, -1]))),
    "smoothing 1.1": (ValueError, "in .0, 1.", lambda: CE(L3, TOKENS, label_smoothing=1.1)),
    "negative z-loss": (ValueError, "z_loss must be at", lambda: CE(L3, TOKENS, z_loss=-1)),
    "z-loss NaN": (ValueError, "z_loss must be at", lambda: CE(L3, TOKENS, z_loss=math.nan)),
    "shifted mask": (ValueError, "mask must have", lambda: CE(L3, TOKENS, mask=TOKENS[:, 1:])),
    "shifted segments": (ValueError, "_ids must", lambda: TARGETS(TOKENS, segment_ids=TOKENS[:1])),
    "shifted logits": (ValueError, "logits must be", lambda: NEXT(L3[:, 1:], TOKENS)),
    "a row without a batch": (ValueError, "tokens must be", lambda: TARGETS(TOKENS[0])),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_by_name(case: str) -> None:
    error, says, call = BAD_INPUT[case]
    with pytest.raises(error, match=says):
        call()

"""The gradient of a group: worked examples with exact answers, and the undivided float64 oracle."""

import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torch_ref.accumulate import accumulate, group_weights
from torch_ref.gradients import gradients
from torch_ref.losses import Weighted, next_token_cross_entropy, next_token_targets
from torch_ref.train import groups
from torch_ref.undivided import concatenate, undivided

EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def test_512_tokens_at_loss_2_and_1536_at_loss_4_have_loss_3_and_a_half(dot) -> None:
    def loss_fn(model, microbatch):
        tokens, mean_loss = microbatch
        return Weighted(mean_loss * tokens.sum() * (1 + model.w.sum()), tokens.sum())

    model = dot(1)
    tokens = [torch.full((1, 512), 1), torch.full((3, 512), 1)]
    group = accumulate(
        model, loss_fn, [(tokens[0], torch.tensor(2.0)), (tokens[1], torch.tensor(4.0))]
    )
    assert (group.loss, group.tokens, group.examples) == (3.5, 2048, 4)
    assert model.w.grad.item() == 3.5


@pytest.mark.parametrize("denominators", ["first", "last"])
def test_an_all_ignored_microbatch_with_nan_gradient_leaves_the_valid_one_alone(
    dot, denominators
) -> None:
    def loss_fn(model, microbatch):
        x, supervised = microbatch
        losses = model(x)[supervised]
        # The hand-written masked mean: 0 / 0 for a microbatch whose labels are all ignored.
        mean = losses.sum() / supervised.sum()
        return Weighted(mean * supervised.sum(), supervised.sum())

    x, valid = torch.tensor([[1.0, 2], [5, 8]]), torch.tensor([True, True])
    nothing = torch.tensor([False, False])
    options = {"weights_fn": lambda m: m[1].sum()} if denominators == "first" else {}
    model = dot(2)
    group = accumulate(
        model,
        loss_fn,
        [(x, nothing), (x, valid), (x, nothing)],
        denominators=denominators,
        **options,
    )
    assert model.w.grad.tolist() == [3.0, 5.0]
    assert (group.loss, group.tokens, group.microbatches) == (0.0, 2, 3)


def test_a_group_with_nothing_supervised_is_empty_with_loss_zero_and_gradient_zero(dot) -> None:
    model = dot(2)
    group = accumulate(
        model, lambda m, x: Weighted(m(x).sum() * math.nan, torch.tensor(0)), [torch.ones(3, 2)] * 2
    )
    assert group.empty
    assert (group.loss, group.grad_norm, group.tokens) == (0.0, 0.0, 0)
    assert model.w.grad.tolist() == [0.0, 0.0]


def test_gradients_1_to_6_in_groups_of_4_have_means_2_and_a_half_and_5_and_a_half(
    dot, dot_loss
) -> None:
    model, means = dot(1), []
    for group in groups(torch.arange(1.0, 7).view(6, 1, 1), 4):
        accumulate(model, dot_loss, group)
        means.append(model.w.grad.item())
    assert means == [2.5, 5.5]


def test_what_the_gradient_held_before_the_group_is_not_in_it(dot, dot_loss) -> None:
    model = dot(1)
    model.w.grad = torch.tensor([math.inf])
    accumulate(model, dot_loss, [torch.ones(2, 1)])
    assert model.w.grad.item() == 1.0


def test_one_microbatch_is_bitwise_the_plain_backward_pass(tiny_gpt, ragged_rows) -> None:
    def loss_fn(model, rows):
        return Weighted(next_token_cross_entropy(model(rows), rows).total, torch.tensor(1))

    model, plain = tiny_gpt(), tiny_gpt()
    accumulate(model, loss_fn, [ragged_rows])
    loss_fn(plain, ragged_rows).total.backward()
    for name, gradient in gradients(plain).items():
        np.testing.assert_array_equal(gradients(model)[name], gradient, strict=True)


def test_a_rejected_microbatch_counts_neither_in_the_sum_nor_in_the_weight(dot, dot_loss) -> None:
    data = [torch.full((n, 1), value) for n, value in [(1, 2.0), (5, 100.0), (2, 3.0), (1, 4.0)]]
    model, seen = dot(1), []

    def reject(gradient):
        seen.append(gradient["w"].item())
        return gradient["w"].norm() > 10

    group = accumulate(model, dot_loss, data, reject=reject)
    assert seen == [2.0, 100.0, 3.0, 4.0]
    assert model.w.grad.item() == (2 + 3 + 3 + 4) / 4
    assert (group.tokens, group.rejected, group.microbatches) == (4, 1, 4)


ROUTER = {"tokens": 1.0, "sequences": 0.5, "router": 0.01}


def three_terms(model, rows):
    """Cross entropy by tokens, a per-sequence term, and a router-like term by microbatches."""
    logits = model(rows)
    cross_entropy = next_token_cross_entropy(
        logits, rows, ignore_index=0, label_smoothing=0.1, z_loss=1e-2
    )
    per_sequence = logits.square().mean(dim=(1, 2)).sum()
    # The square of a mean over the microbatch: not additive over examples, like router losses.
    router = model.tok_emb.weight[rows].mean(dim=(0, 1)).square().sum()
    return {
        "tokens": cross_entropy,
        "sequences": Weighted(per_sequence, torch.tensor(len(rows))),
        "router": Weighted(router, torch.tensor(1)),
    }


def three_weights(rows):
    tokens = next_token_targets(rows, ignore_index=0).sum()
    return {"tokens": tokens, "sequences": len(rows), "router": 1}


@pytest.mark.parametrize("denominators", ["first", "last"])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_smoothing_z_loss_and_router_terms_do_not_depend_on_the_number_of_microbatches(
    tiny_gpt, ragged_rows, distance, microbatches, denominators
) -> None:
    # Identical microbatches, so that the router term, which is defined on one, is comparable.
    model, data = tiny_gpt(torch.float64), [ragged_rows] * microbatches
    options = {"weights_fn": three_weights} if denominators == "first" else {}
    accumulate(model, three_terms, data, coefficients=ROUTER, denominators=denominators, **options)
    alone = undivided(model, three_terms, ragged_rows, coefficients=ROUTER)
    assert distance(gradients(model), alone.gradients) < 8 * EPS[torch.float64]


@pytest.mark.parametrize("denominators", ["first", "last"])
@pytest.mark.parametrize("cut", [[8], [4, 4], [1] * 8, [3, 3, 2], [1, 7], [6, 2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_way_of_cutting_the_batch_gives_the_undivided_gradient(
    tiny_gpt, ragged_rows, distance, dtype, cut, denominators
) -> None:
    def loss_fn(model, rows):
        terms = three_terms(model, rows)
        return {name: terms[name] for name in ("tokens", "sequences")}

    def weights_fn(rows):
        return {name: three_weights(rows)[name] for name in ("tokens", "sequences")}

    coefficients = {"sequences": 0.5}
    model, microbatches = tiny_gpt(dtype), list(ragged_rows.split(cut))
    options = {"weights_fn": weights_fn} if denominators == "first" else {}
    group = accumulate(
        model,
        loss_fn,
        microbatches,
        coefficients=coefficients,
        denominators=denominators,
        **options,
    )
    batch = concatenate(microbatches)
    oracle = undivided(model, loss_fn, batch, coefficients=coefficients)
    own = undivided(model, loss_fn, batch, coefficients=coefficients, dtype=None)
    # At most 4 times the rounding of the undivided pass in the same type, or a few ulps.
    allowed = 4 * max(distance(own.gradients, oracle.gradients), EPS[dtype])
    assert distance(gradients(model), oracle.gradients) <= allowed
    assert group.weights == oracle.weights
    assert group.loss == pytest.approx(oracle.loss, rel=8 * EPS[dtype])
    norm = math.sqrt(sum(float((g**2).sum()) for g in oracle.gradients.values()))
    assert group.grad_norm == pytest.approx(norm, rel=allowed)


def test_repeated_tokens_add_up_in_the_embedding_table_as_in_the_undivided_batch(distance) -> None:
    table = nn.Embedding(4, 3, dtype=torch.float64)

    def loss_fn(model, tokens):
        return Weighted(model(tokens).square().sum(), torch.tensor(tokens.numel()))

    rows = torch.tensor([[0, 0, 2], [2, 0, 0], [1, 0, 2]])
    accumulate(table, loss_fn, list(rows.split(1)))
    want = 2 * table.weight.detach() * torch.tensor([[5], [1], [3], [0]]) / 9
    torch.testing.assert_close(table.weight.grad, want, rtol=1e-15, atol=0)


@given(
    data=st.lists(
        st.tuples(st.integers(-9, 9), st.booleans(), st.booleans()), min_size=1, max_size=12
    )
)
def test_any_partition_is_bitwise_the_same_where_sums_are_exact(data) -> None:
    """Small integers add without rounding, so that no cut may change a single bit."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.0]))

    def loss_fn(model, microbatch):
        values, supervised = microbatch
        return Weighted((values * model.w * supervised).sum(), supervised.sum())

    values = torch.tensor([[float(v)] for v, _, _ in data])
    supervised = torch.tensor([[s] for _, s, _ in data])
    starts = [0] + [i for i, (_, _, cut) in enumerate(data) if cut and i]
    bounds = list(zip(starts, [*starts[1:], len(data)], strict=True))
    model = Scale()
    cut = accumulate(model, loss_fn, [(values[a:b], supervised[a:b]) for a, b in bounds])
    cut_gradient = model.w.grad.clone()
    whole = accumulate(model, loss_fn, [(values, supervised)])
    assert torch.equal(cut_gradient, model.w.grad)
    assert (cut.loss, cut.weights, cut.grad_norm, cut.tokens, cut.examples, cut.empty) == (
        (whole.loss, whole.weights, whole.grad_norm, whole.tokens, whole.examples, whole.empty)
    )


def test_denominators_first_are_counted_before_the_model_runs_at_all(dot) -> None:
    events = []

    def loss_fn(model, x):
        events.append("loss")
        return Weighted(model(x).sum(), torch.tensor(len(x)))

    def weights_fn(x):
        events.append("weights")
        return len(x)

    accumulate(dot(1), loss_fn, [torch.ones(2, 1)] * 3, denominators="first", weights_fn=weights_fn)
    assert events == ["weights"] * 3 + ["loss"] * 3
    assert group_weights(three_weights, [torch.ones(2, 4).long()] * 2)["tokens"] == 12


def test_outputs_are_released_before_the_next_microbatch_begins(dot) -> None:
    outputs: list[weakref.ref] = []
    alive = []

    def loss_fn(model, x):
        alive.append(sum(ref() is not None for ref in outputs))
        output = model(x)
        total = output.square().sum()
        outputs.extend([weakref.ref(output), weakref.ref(total)])
        return {"a": Weighted(total, torch.tensor(1)), "b": Weighted(2 * total, torch.tensor(1))}

    accumulate(dot(2), loss_fn, (torch.ones(2, 2) for _ in range(3)))
    assert alive == [0, 0, 0]
    assert not any(ref() is not None for ref in outputs)

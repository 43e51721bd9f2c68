"""Updates: clipping, optimizer and scheduler once per group, skips that touch nothing, counts."""

import copy
import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_ref.accumulate import accumulate
from torch_ref.losses import Weighted
from torch_ref.train import Counts, groups, train, update


def numbers(*values: float, width: int = 1) -> list[torch.Tensor]:
    """One microbatch of one token per value, whose gradient is that value."""
    return [torch.full((1, width), float(value)) for value in values]


def everything(model, optimizer, scheduler=None):
    """A snapshot that two runs can be compared by, bit by bit."""
    parts = (model.state_dict(), optimizer.state_dict(), scheduler and scheduler.state_dict())
    return copy.deepcopy(parts)


def assert_bitwise(got, want) -> None:
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_bitwise(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_bitwise(a, b)
    elif isinstance(want, torch.Tensor):
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))
    else:
        assert got == want


def adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    return optimizer, LambdaLR(optimizer, lambda n: 1 / (1 + n))


def test_the_finished_gradient_is_clipped_not_each_microbatch(dot, dot_loss) -> None:
    model = dot(2)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    data = [torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 4.0]])]  # means (2, 2)
    attempt = update(model, sgd, dot_loss, data, clip_norm=1.0)
    assert model.w.tolist() == pytest.approx([-(0.5**0.5)] * 2, rel=1e-7)
    assert attempt.group.grad_norm == pytest.approx(8**0.5, rel=1e-15)  # before clipping


def test_clipping_after_accumulation_differs_from_clipping_one_by_one(dot) -> None:
    def loss_fn(model, x):  # a sum, not a mean: gradients (2, 0) and (0, 2) add to (2, 2)
        return Weighted(model(x).sum(), torch.tensor(0.5))

    model = dot(2)
    data = [torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    update(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn, data, clip_norm=1.0)
    # One by one both would become 1 long, and the direction (1, 1) instead of (2, 1).
    assert (model.w[0] / model.w[1]).item() == 2.0


def test_8_microbatches_in_groups_of_4_advance_schedule_optimizer_and_ema_twice(
    dot, dot_loss
) -> None:
    model = dot(1)
    optimizer, scheduler = adamw(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    run = train(
        model,
        optimizer,
        dot_loss,
        groups(numbers(*range(8)), 4),
        scheduler=scheduler,
        after_attempt=lambda attempt: ema.update_parameters(model),
    )
    assert scheduler.last_epoch == 2
    assert optimizer.state[model.w]["step"].item() == 2
    assert ema.n_averaged.item() == 2
    assert [attempt.learning_rate for attempt in run.attempts] == [0.1, 0.05]
    assert run.counts.as_dict() == {
        "microbatches": 8,
        "examples": 8,
        "tokens": 8,
        "attempts": 2,
        "updates": 2,
        "skipped_nonfinite": 0,
        "skipped_empty": 0,
        "dropped_microbatches": 0,
    }


def test_decoupled_weight_decay_acts_once_per_update(dot, dot_loss) -> None:
    model = dot(1)
    with torch.no_grad():
        model.w += 1
    decay_only = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.5)
    update(model, decay_only, dot_loss, numbers(0, 0, 0, 0))
    assert model.w.item() == 0.75


def test_weight_decay_and_momentum_act_on_parameters_that_no_example_uses(dot, dot_loss) -> None:
    model = dot(1)
    model.unused = torch.nn.Parameter(torch.ones(1))
    update(
        model, torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.5), dot_loss, numbers(1)
    )
    assert model.unused.item() == 0.75


def test_one_microbatch_per_group_is_bitwise_the_optimizer_alone(dot) -> None:
    def loss_fn(model, x):
        return Weighted(model(x).square().sum(), torch.tensor(1))

    accumulated, plain = dot(3), dot(3)
    for model in (accumulated, plain):
        torch.nn.init.constant_(model.w, 0.7)
    optimizer, scheduler = adamw(accumulated)
    alone, alone_scheduler = adamw(plain)
    data = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    train(accumulated, optimizer, loss_fn, groups(data, 1), scheduler=scheduler)
    for x in data:
        alone.zero_grad()
        plain(x).square().sum().backward()
        alone.step()
        alone_scheduler.step()
    assert_bitwise(
        everything(accumulated, optimizer, scheduler), everything(plain, alone, alone_scheduler)
    )


def nothing_supervised(model, x):
    """A loss over tokens that are not 0, and NaN when there are none."""
    supervised = x[:, 0] != 0
    return Weighted(model(x)[supervised].mean() * supervised.sum(), supervised.sum())


@pytest.mark.parametrize(
    ("loss_fn", "bad", "cause"),
    [
        (nothing_supervised, (0, 0), "empty"),
        (lambda m, x: Weighted(m(x).sum(), torch.tensor(len(x))), (1, math.inf), "nonfinite"),
        (lambda m, x: Weighted(m(x).sum(), torch.tensor(len(x))), (math.nan, 1), "nonfinite"),
    ],
    ids=["nothing-supervised", "an-inf-in-one-microbatch", "a-nan-in-one-microbatch"],
)
@pytest.mark.parametrize("when", [0, 2], ids=["first-group", "third-group"])
def test_a_skipped_group_leaves_no_trace_but_its_counts(dot, loss_fn, bad, cause, when) -> None:
    clean = [numbers(1, 2), numbers(3), numbers(4, 5), numbers(6, 7)]
    spoiled = [*clean[:when], numbers(*bad), *clean[when:]]
    results = []
    for stream in (clean, spoiled):
        model = dot(1)
        optimizer, scheduler = adamw(model)
        run = train(
            model,
            optimizer,
            loss_fn,
            stream,
            scheduler=scheduler,
            on_nonfinite="skip",
            clip_norm=1.0,
        )
        results.append((run, everything(model, optimizer, scheduler)))
    (clean_run, clean_state), (run, state) = results
    assert_bitwise(state, clean_state)
    assert [a.skipped for a in run.attempts] == [cause if i == when else None for i in range(5)]
    assert not run.attempts[when].updated
    counts, clean_counts = run.counts.as_dict(), clean_run.counts.as_dict()
    assert counts.pop(f"skipped_{cause}") == 1
    assert counts.pop("attempts") == clean_counts.pop("attempts") + 1 == 5
    assert counts.pop("microbatches") == clean_counts.pop("microbatches") + 2
    assert counts.pop("examples") == clean_counts.pop("examples") + 2
    assert counts.pop("tokens") == clean_counts.pop("tokens") + (0 if cause == "empty" else 2)
    assert counts.items() <= clean_counts.items()
    assert counts["updates"] == 4


def test_a_skipped_first_group_leaves_the_optimizer_without_state(dot) -> None:
    model = dot(1)
    optimizer, scheduler = adamw(model)
    before = everything(model, optimizer, scheduler)
    update(model, optimizer, nothing_supervised, numbers(0, 0), scheduler=scheduler)
    assert_bitwise(everything(model, optimizer, scheduler), before)


def test_a_nonfinite_gradient_is_an_error_that_names_the_parameter_by_default(
    dot, dot_loss
) -> None:
    model = dot(1)
    with pytest.raises(FloatingPointError, match="gradient of 'w' is not finite"):
        update(model, torch.optim.SGD(model.parameters()), dot_loss, numbers(1, math.inf))
    assert model.w.item() == 0


def test_a_stream_shorter_than_a_group_is_one_update_or_is_reported_as_dropped(
    dot, dot_loss
) -> None:
    for last, updates, dropped in [("keep", 1, 0), ("drop", 0, 3)]:
        model, counts = dot(1), Counts()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        stream = groups(numbers(1, 2, 3), 4, last=last, counts=counts)
        train(model, sgd, dot_loss, stream, counts=counts)
        assert (counts.updates, counts.dropped_microbatches) == (updates, dropped)
        assert model.w.item() == -2.0 * updates


@pytest.mark.parametrize("last", ["keep", "drop"])
def test_the_next_epoch_begins_with_a_group_of_its_own(last) -> None:
    counts = Counts()
    epochs = [list(groups(range(63), 8, last=last, counts=counts)) for _ in range(2)]
    assert epochs[0] == epochs[1]
    assert [len(group) for group in epochs[1]] == [8] * 7 + ([7] if last == "keep" else [])
    assert epochs[1][0] == list(range(8))
    assert counts.dropped_microbatches == (14 if last == "drop" else 0)


def test_a_group_size_that_changes_between_groups_loses_and_repeats_nothing(dot, dot_loss) -> None:
    stream, model, seen = iter(numbers(*range(1, 15))), dot(1), []

    def changing():
        for size in (8, 2, 2, 2):
            yield [next(stream) for _ in range(size)]

    run = train(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        dot_loss,
        changing(),
        after_attempt=lambda attempt: seen.append(model.w.grad.item()),
    )
    assert seen == [4.5, 9.5, 11.5, 13.5]
    assert (run.counts.microbatches, run.counts.updates) == (14, 4)


def test_microbatches_of_2_examples_in_a_group_of_8_are_16_examples_per_update(
    dot, dot_loss
) -> None:
    model = dot(1)
    run = train(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        dot_loss,
        groups([torch.ones(2, 1)] * 16, 8),
    )
    assert [attempt.group.examples for attempt in run.attempts] == [16, 16]


def test_three_thousand_million_tokens_are_counted_to_the_last_one(dot) -> None:
    def loss_fn(model, x):
        return Weighted(model(x).sum(), torch.tensor(1_500_000_001))

    model = dot(1)
    run = train(model, torch.optim.SGD(model.parameters()), loss_fn, groups(numbers(1, 2), 1))
    assert run.counts.tokens == 3_000_000_002


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"clip_norm": math.nan}, "clip_norm must be above 0"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be"),
    ],
    ids=["clip-to-zero", "clip-to-nan", "unknown-policy"],
)
def test_bad_options_of_an_update_are_refused_before_anything_runs(dot, options, says) -> None:
    model = dot(1)
    with pytest.raises(ValueError, match=says):
        update(model, torch.optim.SGD(model.parameters()), None, numbers(1), **options)


@pytest.mark.parametrize(
    ("size", "options", "says"),
    [
        (0, {}, "size must be at least 1"),
        (4, {"last": "drop"}, "needs counts"),
        (4, {"last": "pad"}, "last must be"),
    ],
    ids=["size-0", "drop-without-counts", "unknown-policy"],
)
def test_bad_options_of_groups_are_refused_when_called_not_when_read(size, options, says) -> None:
    with pytest.raises(ValueError, match=says):
        groups([], size, **options)


def test_accumulate_alone_touches_no_parameter(dot, dot_loss) -> None:
    model = dot(1)
    accumulate(model, dot_loss, numbers(1, 2))
    assert model.w.item() == 0

"""Loss scaling moves between groups only, and what it skips leaves no trace."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torch_ref.accumulate import accumulate
from torch_ref.amp import autocast, scaled_update
from torch_ref.gradients import gradients, parameters
from torch_ref.losses import Weighted
from torch_ref.train import groups, train, update
from torch_ref.undivided import undivided


class CountingScaler(torch.amp.GradScaler):
    """Counts what is called once per attempt."""

    def __init__(self, **options) -> None:
        super().__init__("cpu", **options)
        self.calls = {"unscale_": 0, "step": 0, "update": 0}

    def unscale_(self, optimizer):
        self.calls["unscale_"] += 1
        return super().unscale_(optimizer)

    def step(self, optimizer, *args, **kwargs):
        self.calls["step"] += 1
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        self.calls["update"] += 1
        return super().update(new_scale)


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.full((1, 1), float(value)) for value in values]


def adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return optimizer, LambdaLR(optimizer, lambda n: 1 / (1 + n))


def test_after_an_overflow_in_group_1_the_scale_halves_from_group_2_on_never_inside_one(
    dot,
) -> None:
    scaler, scales = CountingScaler(init_scale=8.0), []

    def loss_fn(model, x):
        scales.append(scaler.get_scale())
        return Weighted(model(x).sum(), torch.tensor(1))

    model = dot(1)
    optimizer, scheduler = adamw(model)
    untouched = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    attempts = [
        scaled_update(
            model, optimizer, loss_fn, numbers(math.inf, 1), scaler=scaler, scheduler=scheduler
        )
    ]
    assert untouched == (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
    run = train(
        model,
        optimizer,
        loss_fn,
        groups(numbers(1, 2, 3, 4), 2),
        update_fn=scaled_update,
        scaler=scaler,
        scheduler=scheduler,
    )
    attempts += run.attempts
    assert scales == [8, 8, 4, 4, 4, 4]
    assert [attempt.loss_scale for attempt in attempts] == [8, 4, 4]
    assert [attempt.skipped for attempt in attempts] == ["nonfinite", None, None]
    assert [attempt.learning_rate for attempt in attempts] == [0.1, 0.1, 0.05]
    assert [attempt.group.grad_norm for attempt in attempts] == [math.inf, 1.5, 3.5]
    assert scaler.calls == {"unscale_": 3, "step": 3, "update": 3}
    assert (
        scheduler.last_epoch == optimizer.state[model.w]["step"].item() == run.counts.updates == 2
    )


def test_the_scale_grows_by_clean_groups_not_by_microbatches(dot, dot_loss) -> None:
    scaler = CountingScaler(init_scale=8.0, growth_interval=2)
    model = dot(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = groups(numbers(*range(1, 13)), 4)
    run = train(model, sgd, dot_loss, stream, update_fn=scaled_update, scaler=scaler)
    assert [attempt.loss_scale for attempt in run.attempts] == [8, 8, 16]


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_power_of_two_scale_changes_no_bit_of_loss_norm_or_parameters(
    tiny_gpt, ragged_rows, clip_norm
) -> None:
    def loss_fn(model, rows):
        return Weighted(model(rows).square().sum(), torch.tensor(rows.numel()))

    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        model = tiny_gpt()
        optimizer, scheduler = adamw(model)
        options = {} if scaler is None else {"scaler": scaler, "update_fn": scaled_update}
        run = train(
            model,
            optimizer,
            loss_fn,
            groups(ragged_rows.split(2), 3),
            scheduler=scheduler,
            clip_norm=clip_norm,
            **options,
        )
        weights = {name: value.tobytes() for name, value in parameters(model).items()}
        results.append(([a.group for a in run.attempts], weights, run.counts))
    assert results[0] == results[1]


def test_a_group_with_nothing_supervised_neither_updates_nor_moves_the_scale(dot) -> None:
    scaler, model = CountingScaler(init_scale=8.0, growth_interval=1), dot(1)
    optimizer, scheduler = adamw(model)
    attempt = scaled_update(
        model,
        optimizer,
        lambda m, x: Weighted(m(x).sum() * math.nan, torch.tensor(0)),
        numbers(1, 2),
        scaler=scaler,
        scheduler=scheduler,
    )
    assert (attempt.skipped, scaler.get_scale(), scaler.calls["update"]) == ("empty", 8.0, 0)
    assert (scheduler.last_epoch, optimizer.state_dict()["state"]) == (0, {})


def narrow_loss(model, x):
    """Two layers, so that a gradient passes between them in the type of the computation."""
    return Weighted(model(x).float().sum() * 2.0**-30, torch.tensor(1))


def two_linear() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, 1.0)
    return model


def test_a_loss_scale_keeps_float16_gradients_that_would_vanish() -> None:
    loss_fn, found = autocast(narrow_loss, torch.float16), {}
    for scale in (1.0, 2.0**20):
        model = two_linear()
        scaled_update(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss_fn,
            numbers(1, 1),
            scaler=torch.amp.GradScaler("cpu", init_scale=scale),
        )
        found[scale] = gradients(model)["0.weight"].item()
    assert found == {1.0: 0.0, 2.0**20: 2.0**-30}


def test_a_scale_too_large_for_float16_backs_off_group_by_group_until_updates_resume() -> None:
    model = two_linear()
    before = parameters(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**48)
    skipped = []
    for _ in range(4):
        attempt = scaled_update(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            autocast(narrow_loss, torch.float16),
            numbers(1, 1),
            scaler=scaler,
        )
        skipped.append(attempt.skipped)
        if attempt.skipped:
            assert parameters(model) == before
    # 2^48 * 2^-30 is above 65504, and so is 2^16; 2^15 fits.
    assert skipped == ["nonfinite"] * 3 + [None]
    assert scaler.get_scale() == 2.0**45


def test_bfloat16_autocast_sums_in_float32_for_every_partition(
    tiny_gpt, ragged_rows, distance
) -> None:
    def loss_fn(model, rows):
        return Weighted(model(rows).float().square().sum(), torch.tensor(rows.numel()))

    narrow, model = autocast(loss_fn, torch.bfloat16), tiny_gpt()
    oracle = undivided(model, loss_fn, ragged_rows).gradients
    own = distance(undivided(model, narrow, ragged_rows, dtype=None).gradients, oracle)
    assert own > 1e-4  # the computation is narrow indeed
    for size in (1, 3, 8):
        update(model, torch.optim.SGD(model.parameters(), lr=0.0), narrow, ragged_rows.split(size))
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        assert distance(gradients(model), oracle) <= 4 * own


def test_bad_input_is_refused_before_anything_runs(dot, dot_loss) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for dtype in (torch.float16, torch.bfloat16):
        narrow = dot(1, dtype)
        with pytest.raises(ValueError, match=r"'w' in torch\..*float16: keep parameters"):
            scaled_update(narrow, torch.optim.SGD(narrow.parameters()), None, [], scaler=scaler)
    with pytest.raises(ValueError, match="clip_norm must be above 0"):
        scaled_update(
            model := dot(1),
            torch.optim.SGD(model.parameters()),
            None,
            [],
            scaler=scaler,
            clip_norm=0,
        )


def test_the_gradient_left_behind_is_unscaled(dot, dot_loss) -> None:
    scaled, plain = dot(1), dot(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    sgd = torch.optim.SGD(scaled.parameters(), lr=1.0)
    scaled_update(scaled, sgd, dot_loss, numbers(1, 2, 4), scaler=scaler)
    accumulate(plain, dot_loss, numbers(1, 2, 4))
    assert torch.equal(scaled.w.grad, plain.w.grad)

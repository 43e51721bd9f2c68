"""Two replicas in two processes: the group's denominators, one reduction, the same updates.

One pair of processes runs every scenario, because starting them takes longer than all of these.
"""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torch_ref.gradients import gradients, parameters
from torch_ref.launch import spawn
from torch_ref.losses import Weighted, next_token_cross_entropy, next_token_targets
from torch_ref.models import GPT, GPTConfig
from torch_ref.replicas import Replica
from torch_ref.train import Counts, train
from torch_ref.undivided import concatenate, undivided

COEFFICIENTS = {"sequences": 0.5}


class Dot(nn.Module):
    def __init__(self, width: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width, dtype=dtype))


def dot_loss(model, x):
    return Weighted((x @ model.w).sum(), torch.tensor(len(x)))


def two_terms(model, rows):
    logits = model(rows)
    poison = torch.where((rows == 31).all(), math.inf, 1.0)  # a row of 31s has an inf gradient
    return {
        "tokens": next_token_cross_entropy(logits, rows, ignore_index=0),
        "sequences": Weighted(
            poison * logits.square().mean((1, 2))[rows[:, 0] != 0].sum(), (rows[:, 0] != 0).sum()
        ),
    }


def two_weights(rows):
    tokens = next_token_targets(rows, ignore_index=0).sum()
    return {"tokens": tokens, "sequences": (rows[:, 0] != 0).sum()}


def small_gpt(dtype=torch.float64) -> GPT:
    return GPT(GPTConfig(vocab_size=32, max_length=16, layers=2, heads=2, width=16), dtype=dtype)


def ragged(*lengths: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randint(1, 31, (len(lengths), 12), generator=torch.Generator().manual_seed(seed))
    for row, length in enumerate(lengths):
        rows[row, length:] = 0
    return rows


# Each cut: the microbatches of replica 0, then those of replica 1. A row of length 0 is padding.
ROWS = ragged(12, 2, 7, 1, 12, 3, 9, 5)
CUTS = {
    "one microbatch each": ([ROWS[:4]], [ROWS[4:]]),
    "three each, ragged": (ROWS[:5].split([2, 2, 1]), ROWS[5:].split(1)),
    "eight on one replica and none on the other": (ROWS.split(1), []),
    "one replica with nothing supervised": ([ragged(0, 0)], [ROWS[:3], ROWS[3:]]),
    "an all-ignored last microbatch": ([ROWS[:5], ragged(0)], [ROWS[5:]]),
}

INF, EMPTY = torch.full((1, 12), 31), ragged(0, 0)
GROUPS = [
    ([ragged(12, 3, seed=1), ragged(5, seed=2)], [ragged(2, 9, seed=3), ragged(1, 12, seed=4)]),
    ([ragged(7, seed=5), INF], [ragged(4, 4, seed=6)]),
    ([ragged(7, 8, seed=7)], [ragged(4, 4, seed=8), ragged(11, seed=9)]),
    ([EMPTY], [EMPTY, EMPTY]),
    ([ragged(3, 8, seed=10)] * 2, [ragged(4, 4, seed=11)] * 2),
    ([ragged(6, 2, seed=12)], []),
]


def adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return optimizer, LambdaLR(optimizer, lambda n: 1 / (1 + n))


def two_replicas_two_microbatches(rank: int):
    data = [
        [torch.full((1, 1), 1.0), torch.full((3, 1), 2.0)],
        [torch.full((2, 1), 3.0), torch.full((10, 1), 4.0)],
    ]
    model = Dot()
    group = Replica(model, dot_loss, weights_fn=len).accumulate(data[rank])
    return model.w.grad.item(), group.tokens, group.microbatches, group.examples


def every_cut(rank: int):
    found = {}
    for dtype, name in itertools.product((torch.float32, torch.float64), CUTS):
        model = small_gpt(dtype)
        replica = Replica(model, two_terms, weights_fn=two_weights, coefficients=COEFFICIENTS)
        group = replica.accumulate(CUTS[name][rank])
        found[dtype, name] = (gradients(model), group, replica.reductions.gradients)
    return found


def six_groups(rank: int):
    model, counts = small_gpt(), Counts()
    optimizer, scheduler = adamw(model)
    replica = Replica(model, two_terms, weights_fn=two_weights, coefficients=COEFFICIENTS)
    attempts, reductions = [], []
    for group in GROUPS:
        attempts.append(
            replica.update(
                optimizer,
                group[rank],
                scheduler=scheduler,
                clip_norm=0.5,
                on_nonfinite="skip",
                counts=counts,
            )
        )
        reductions.append(replica.reductions.gradients)
    return attempts, counts, parameters(model), scheduler.last_epoch, reductions


def several_buckets(rank: int):
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))
    replica = Replica(
        model, lambda m, x: Weighted(m(x).sum(), torch.tensor(len(x))), weights_fn=len
    )
    found = []
    for _ in range(3):
        replica.accumulate([torch.ones(2, 512)] * 4)
        found.append((replica.reductions.gradients, replica.reductions.bytes))
    return found, replica.reductions.buckets, sum(p.nbytes for p in model.parameters())


def refusals(rank: int):
    said = []
    for loss_weight, part in [(rank + 1, [torch.ones(1, 1)]), (1, [])]:
        replica = Replica(
            Dot(),
            lambda m, x, w=loss_weight: Weighted((x @ m.w).sum(), torch.tensor(w)),
            weights_fn=len,
        )
        try:
            replica.accumulate(part)
        except ValueError as error:
            said.append(str(error))
    try:
        Replica(Dot(1, torch.bfloat16), dot_loss, weights_fn=len)
    except ValueError as error:
        said.append(str(error))
    return said


def unlike_beginnings(rank: int):
    model = Dot()
    with torch.no_grad():
        model.w += rank + 5
    Replica(model, dot_loss, weights_fn=len)
    return model.w.item()


SCENARIOS = [
    two_replicas_two_microbatches,
    every_cut,
    six_groups,
    several_buckets,
    refusals,
    unlike_beginnings,
]


def run_scenarios(rank: int):
    found = {}
    for scenario in SCENARIOS:
        found[scenario.__name__] = scenario(rank)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def replicas():
    """What every scenario returned, by rank and name."""
    return spawn(run_scenarios, 2, timeout=100)


def test_tokens_1_3_and_2_10_with_gradients_1_2_and_3_4_have_gradient_3_3125(replicas) -> None:
    for found in replicas:
        assert found["two_replicas_two_microbatches"] == (3.3125, 16, 4, 16)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_way_of_cutting_over_replicas_gives_the_undivided_gradient(
    replicas, distance, dtype, name
) -> None:
    batch = concatenate([*CUTS[name][0], *CUTS[name][1]])
    model = small_gpt(dtype)
    oracle = undivided(model, two_terms, batch, coefficients=COEFFICIENTS)
    own = undivided(model, two_terms, batch, coefficients=COEFFICIENTS, dtype=None)
    eps = torch.finfo(dtype).eps
    for found in replicas:
        gradient, group, reductions = found["every_cut"][dtype, name]
        allowed = 4 * max(distance(own.gradients, oracle.gradients), eps)
        assert distance(gradient, oracle.gradients) <= allowed
        assert group.weights == oracle.weights
        assert group.loss == pytest.approx(oracle.loss, rel=8 * eps)
        assert group.examples == len(batch)
        assert reductions == 1


def test_six_groups_are_the_updates_of_one_process_with_all_the_microbatches(replicas) -> None:
    model = small_gpt()
    optimizer, scheduler = adamw(model)
    run = train(
        model,
        optimizer,
        two_terms,
        [[*first, *second] for first, second in GROUPS],
        coefficients=COEFFICIENTS,
        scheduler=scheduler,
        clip_norm=0.5,
        on_nonfinite="skip",
    )
    want = parameters(model)
    for found in replicas:
        attempts, counts, weights, advances, _ = found["six_groups"]
        assert counts == run.counts
        assert (counts.updates, counts.skipped_nonfinite, counts.skipped_empty) == (4, 1, 1)
        assert advances == 4
        assert [a.skipped for a in attempts] == [None, "nonfinite", None, "empty", None, None]
        for got, expected in zip(attempts, run.attempts, strict=True):
            if got.skipped != "nonfinite":
                assert got.group.loss == pytest.approx(expected.group.loss, rel=1e-12)
                assert got.group.grad_norm == pytest.approx(expected.group.grad_norm, rel=1e-12)
            assert got.group.weights == expected.group.weights
        for name, value in want.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-12, atol=1e-14)


def test_all_replicas_hold_bitwise_the_same_parameters_and_report_the_same(replicas) -> None:
    (a_attempts, a_counts, a, *_), (b_attempts, b_counts, b, *_) = (
        found["six_groups"] for found in replicas
    )
    assert {name: value.tobytes() for name, value in a.items()} == {
        name: value.tobytes() for name, value in b.items()
    }
    assert a_counts == b_counts
    assert [x.skipped for x in a_attempts] == [x.skipped for x in b_attempts]
    assert a_attempts[0].group == b_attempts[0].group


def test_there_is_one_reduction_per_group_and_none_when_nothing_is_supervised(replicas) -> None:
    for found in replicas:
        assert found["six_groups"][-1] == [1, 2, 3, 3, 4, 5]


def test_a_gradient_of_several_buckets_crosses_once_per_group_whole(replicas) -> None:
    for found in replicas:
        reductions, buckets, size = found["several_buckets"]
        assert reductions == [(1, size), (2, 2 * size), (3, 3 * size)]
        assert buckets > 3


def test_what_one_replica_does_wrong_is_an_error_on_all_of_them(replicas) -> None:
    for found in replicas:
        disagree, nobody, narrow = found["refusals"]
        assert "weights_fn counted {'loss': 1} on replica 1, but loss_fn reported" in disagree
        assert "microbatches is empty on every replica" in nobody
        assert "parameter 'w' in torch.bfloat16" in narrow


def test_replicas_begin_with_the_weights_of_the_first(replicas) -> None:
    assert [found["unlike_beginnings"] for found in replicas] == [5.0, 5.0]

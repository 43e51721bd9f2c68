"""Preflight: each line passes for a right step, and fails for the fault that it is for."""

import json

import jax
import numpy as np
import optax
import pytest

import jax_accum as ja
from jax_accum.doctor import preflight
from tests.faults import problem as p

tx = ja.guard(optax.sgd(p.RATE))
value_and_grad = jax.jit(ja.accumulated_value_and_grad(p.loss_fn, None))
kept = []


@jax.jit
def apply(params, state, grads, weight, microbatches, examples):
    updates, state = tx.update(
        grads, state, params, weight=weight, microbatches=microbatches, examples=examples
    )
    return optax.apply_updates(params, updates), state


def right(params, state, microbatches, told=p.A):
    (loss, info), grads = value_and_grad(params, p.stacked(microbatches))
    params, state = apply(params, state, grads, info.weights["loss"], told, told * p.M)
    return params, state, {"loss": loss}


def one_example_twice(params, state, microbatches):
    first = {name: x.copy() for name, x in microbatches[0].items()}
    for name in first:
        first[name][1] = first[name][0]
    return right(params, state, [first, *microbatches[1:]])


def wrong_loss(params, state, microbatches):
    params, state, metrics = right(params, state, microbatches)
    return params, state, {"loss": metrics["loss"] / p.A}


def not_finite(params, state, microbatches):
    _, state, metrics = right(params, state, microbatches)
    return p.times(params, np.nan), state, metrics


def group_does_not_end(params, state, microbatches):
    return params, right(params, state, microbatches)[1]


def miscounts(params, state, microbatches):
    return right(params, state, microbatches, told=1)


def keeps_every_loss(params, state, microbatches):
    out = right(params, state, microbatches)
    kept.append(out[2]["loss"])
    return out


def case_of(seed):
    # More parameters than examples, so that the share of each can be solved for.
    return p.make_case(seed, init=tx.init)


def test_a_right_step_passes_every_line_and_the_record_has_them_as_preparation():
    record = ja.RunRecord(
        plan=ja.BatchPlan(microbatch_size=p.M, microbatches=p.A),
        normalisation={"loss": "supervised tokens"},
        optimizer="sgd(0.5)",
        data="drawn",
    )
    report = preflight(right, case_of(1), record=record)
    assert report.passed
    assert [line.passed for line in report.lines] == [True] * 6, report
    assert [line.name for line in report.lines] == [
        "every example once",
        "the loss is the weighted one",
        "finite",
        "the group ends in one right update",
        "counters",
        "memory of later groups",
    ]
    assert record.preparation == [f"preflight {line}" for line in report.lines]
    assert record.trials == []
    assert json.loads(report.to_json())["passed"] is True


@pytest.mark.parametrize(
    ("update", "failing"),
    [
        (one_example_twice, "every example once"),
        (wrong_loss, "the loss is the weighted one"),
        (not_finite, "finite"),
        (group_does_not_end, "the group ends in one right update"),
        (miscounts, "counters"),
        (keeps_every_loss, "memory of later groups"),
    ],
    ids=lambda x: x.__name__ if callable(x) else None,
)
def test_a_line_fails_for_the_fault_it_is_for(update, failing):
    report = preflight(update, case_of(2))
    kept.clear()
    assert not report.passed
    failed = [line for line in report.lines if line.passed is False]
    assert failing in [line.name for line in failed], report
    if update in (wrong_loss, miscounts, keeps_every_loss):
        assert len(failed) == 1, report


def test_an_example_that_counts_twice_or_not_at_all_is_named():
    case = case_of(3)
    seen = []

    def watching(params, state, microbatches):
        seen.append(microbatches[0]["x"])
        return one_example_twice(params, state, microbatches)

    detail = preflight(watching, case).lines[0].detail
    twice, lost = (
        next(i for i, e in enumerate(case.examples) if np.array_equal(e["x"], x)) for x in seen[0]
    )
    assert f"{twice}: 2.0" in detail
    assert f"{lost}: 0.0" in detail


def test_two_sides_are_held_against_each_other():
    def plain(params, state, microbatches):
        grads = p.right_gradient(params, microbatches)
        return jax.tree.map(lambda w, g: w - p.RATE * g, params, grads), state

    both = preflight({"guarded": (right, tx.init), "by hand": (plain, None)}, case_of(4))
    assert both.passed
    assert both.lines[-1].name == "the same update"

    def another(params, state, microbatches):
        return plain(params, state, microbatches[:-1])

    apart = preflight({"guarded": (right, tx.init), "by hand": (another, None)}, case_of(4))
    assert apart.lines[-1].passed is False

"""The largest microbatch within a budget: right, in few compilations, with advice if none fits."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_accum as ja
from jax_accum.memory import DoesNotFitError, _search, as_bytes, largest_microbatch
from jax_accum.memory._analyze import Analysis, Part
from jax_accum.memory._line import fit

pytest.importorskip("flax")
from jax_accum.crosscheck.gpt import GPTSizes
from jax_accum.memory._presets import preset

N = 24


class Ledger:
    """A `make` whose programs need what `peak(m)` says; compilations are noted."""

    def __init__(self, monkeypatch, peak, logits=None):
        self.compiled = []

        def make(plan):
            return plan, ()

        def lower(step, *args):
            return step

        def compile_and_read(plan):
            m = plan.microbatch_size
            self.compiled.append(m)
            total = peak(m)
            if isinstance(total, Exception):
                raise total
            parts = (Part("parameters", 100, False), Part("optimizer state", 200, False))
            parts += (Part("gradient accumulator", 100, True),)
            parts += (Part("activations of one microbatch", total - 400, True),)
            return Analysis(300, 300, 300, total - 300, parts, logits, (), 5.0, 0.1, "cpu")

        monkeypatch.setattr(_search, "lower", lower)
        monkeypatch.setattr(_search, "compile_and_read", compile_and_read)
        self.make = make


PLAN = ja.BatchPlan(microbatch_size=4, microbatches=6, replicas=2)
SIZES = [1, 2, 3, 4, 6, 8, 12, 24]
CURVES = {
    "a line": lambda m: 400 + 50 * m,
    "steps": lambda m: 400 + 200 * -(-m // 4) + m,
    "a curve upwards": lambda m: 400 + 3 * m * m,
    "a curve downwards": lambda m: 400 + round(400 * m**0.5),
    "all the same": lambda m: 500,
}


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_the_largest_that_fits_is_found_for_every_budget_and_both_neighbours_are_compiled(
    monkeypatch, curve
):
    for budget in sorted({curve(m) + off for m in SIZES for off in (-1, 0)} - {curve(1) - 1}):
        if budget < curve(1):
            continue
        ledger = Ledger(monkeypatch, curve)
        found = largest_microbatch(ledger.make, PLAN, budget)
        want = max(m for m in SIZES if curve(m) <= budget)
        assert found.plan.microbatch_size == want
        assert found.plan.examples_per_update == PLAN.examples_per_update
        assert want in ledger.compiled
        larger = SIZES[SIZES.index(want) + 1 :][:1]
        assert set(larger) <= set(ledger.compiled)
        assert len(ledger.compiled) == len(set(ledger.compiled)) == found.compilations
        # The first, two guesses, and halving the five that are left at most.
        assert len(ledger.compiled) <= 6
        assert [row.plan.microbatch_size for row in found.rows] == SIZES
        assert [row.fits for row in found.rows] == [m <= want for m in SIZES]


def test_on_a_line_three_compilations_do(monkeypatch):
    ledger = Ledger(monkeypatch, CURVES["a line"])
    found = largest_microbatch(ledger.make, PLAN, 400 + 50 * 7)
    assert found.plan.microbatch_size == 6
    assert len(ledger.compiled) == 3
    assert found.line(24) == 400 + 50 * 24
    table = found.table().splitlines()
    assert table[0].split()[:3] == ["m", "A", "peak"]
    assert table[5].endswith("<-")
    assert "~1.56 KiB" in table[-1]  # 1,600 bytes, predicted


def test_running_out_while_compiling_is_too_large_and_other_errors_are_passed_on(monkeypatch):
    ran_out = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while compiling")
    ledger = Ledger(monkeypatch, lambda m: ran_out if m > 3 else 500)
    found = largest_microbatch(ledger.make, PLAN, 1000)
    assert found.plan.microbatch_size == 3
    assert "ran out" in found.table()
    wrong = jax.errors.JaxRuntimeError("INVALID_ARGUMENT: something else")
    ledger = Ledger(monkeypatch, lambda m: wrong)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        largest_microbatch(ledger.make, PLAN, 1000)


def test_a_budget_below_the_parameters_says_that_no_size_helps(monkeypatch):
    ledger = Ledger(monkeypatch, CURVES["a line"])
    with pytest.raises(DoesNotFitError, match=r"(?s)parameters alone take 100 B .* budget of 99 B"):
        largest_microbatch(ledger.make, PLAN, 99)
    assert ledger.compiled == [1]


def test_when_one_example_does_not_fit_it_says_what_would_stay_and_what_would_help(monkeypatch):
    logits = ja.memory._traced.Value("float32", (1, 8, 32), 10, "log")
    ledger = Ledger(monkeypatch, lambda m: 400 + 100 * m, logits)
    with pytest.raises(DoesNotFitError) as caught:
        largest_microbatch(ledger.make, PLAN, 450)
    said = str(caught.value)
    assert "needs 500 B on each device, 50 B more than the budget of 450 B" in said
    assert "400 B would stay however small the microbatch" in said
    advice = [line for line in said.splitlines() if line.startswith("  - ")]
    assert advice[0].startswith("  - optimizer state: 200 B, 40% of the peak; shard it")
    assert 'reduce="each"' in said
    assert "chunked_next_token_cross_entropy" not in said  # of the activations, 30 B are logits
    ledger = Ledger(monkeypatch, lambda m: 400 + 100 * m, logits._replace(bytes=40))
    with pytest.raises(DoesNotFitError, match="logits and their gradient"):
        largest_microbatch(ledger.make, ja.BatchPlan(microbatch_size=1, microbatches=1), 450)


def test_a_prime_number_of_examples_is_pointed_out(monkeypatch):
    ledger = Ledger(monkeypatch, lambda m: 400 + m)
    plan = ja.BatchPlan(microbatch_size=1, microbatches=7, replicas=2)
    found = largest_microbatch(ledger.make, plan, 405)
    assert found.plan.microbatch_size == 1
    assert "7 examples per replica is a prime: m can be 1 or 7 alone" in found.notes[0]
    assert "8 would offer 1, 2, 4, 8" in found.notes[0]


@pytest.mark.parametrize("made", [None, (1,), (1, [2])])
def test_a_make_that_returns_something_else_is_refused(made):
    with pytest.raises(TypeError, match=r"make must return \(step, args\)"):
        largest_microbatch(lambda plan: made, PLAN, 1000)


BUDGETS = {
    "16 pounds": "cannot be read",
    "": "cannot be read",
    "-1GiB": "cannot be read",
    "nan": "cannot be read",
    "1e9": "cannot be read",
    "0": "at least 1 byte",
    0: "at least 1 byte",
    "0%": "above 0%",
    "101%": "at most 100%",
    "80%": "does not say how much memory",
    None: "does not say how much memory",
    1.5: "whole number of bytes",
    True: "bytes or text",
}


@pytest.mark.parametrize(("budget", "message"), BUDGETS.items(), ids=map(repr, BUDGETS))
def test_a_budget_that_cannot_be_read_is_named(budget, message):
    with pytest.raises((TypeError, ValueError), match=f"budget.*{message}"):
        as_bytes(budget)


@pytest.mark.parametrize(
    ("budget", "want"), [("50%", 2**33), (None, 2**34), ("1 TB", 10**12), ("2.5kib", 2560)]
)
def test_a_share_is_of_what_the_device_may_use(budget, want):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 2**34, "bytes_in_use": 1}

    assert as_bytes(budget, Device()) == want


def test_a_line_through_peaks_of_different_size_is_fitted_by_relative_error():
    line = fit({1: 1000, 100: 110_000}, 0)
    assert line(1) == 1000
    assert line(100) == 110_000
    bent = fit({1: 100, 50: 10_000, 100: 30_000}, 0)
    assert abs(bent(1) / 100 - 1) < 0.1  # unweighted, it would be 3,000 off
    assert fit({4: 900}, 100)(8) == 1700


# What is left is compiled for real, and nothing is run.

GPTS = {
    "width 16": GPTSizes(vocab_size=64, max_length=32, layers=1, heads=2, width=16),
    "width 32, longer rows": GPTSizes(vocab_size=256, max_length=64, layers=1, heads=2, width=32),
    "two layers, a larger vocabulary": GPTSizes(
        vocab_size=1024, max_length=64, layers=2, heads=2, width=32
    ),
}


@pytest.mark.parametrize("sizes", GPTS.values(), ids=GPTS)
def test_peaks_of_a_gpt_are_in_order_and_two_of_them_predict_the_others(sizes):
    make, plan = preset(sizes, 16), ja.BatchPlan(microbatch_size=1, microbatches=16)
    peaks = {}
    for m in (1, 2, 4, 8, 16):
        step, args = make(plan.with_microbatch_size(m))
        peaks[m] = ja.memory.analyze(step, *args).peak
    assert sorted(peaks, key=lambda m: peaks[m]) == [1, 2, 4, 8, 16]
    line = fit({m: peaks[m] for m in (1, 4)}, 0)
    assert sorted(peaks, key=line) == [1, 2, 4, 8, 16]
    for m in (2, 8):
        assert line(m) == pytest.approx(peaks[m], rel=0.10)


def network(width):
    """A `make` for one layer on rows of 8 features."""
    w, rows = jax.ShapeDtypeStruct((8, width), "float32"), jax.ShapeDtypeStruct((2, 8), "float32")
    tx = optax.sgd(0.1)

    def loss_fn(w, x):
        return ja.Weighted(jnp.sum(jnp.tanh(x @ w) ** 2), x.shape[0])

    def make(plan):
        return ja.make_train_step(loss_fn, tx, plan.microbatches), (w, tx.init(w), rows)

    return make


def test_what_was_compiled_is_cached_by_program_and_versions(tmp_path, monkeypatch):
    make, plan = network(32), ja.BatchPlan(microbatch_size=1, microbatches=2)
    first = largest_microbatch(make, plan, "1GiB", cache=tmp_path)
    assert [row.how for row in first.rows] == ["compiled", "compiled"]
    monkeypatch.setattr(_search, "compile_and_read", None)  # would raise
    again = largest_microbatch(make, plan, "1GiB", cache=tmp_path)
    assert [row.how for row in again.rows] == ["cached", "cached"]
    assert again.compilations == 0
    assert [dataclasses.replace(row, how="") for row in again.rows] == [
        dataclasses.replace(row, how="") for row in first.rows
    ]
    monkeypatch.undo()
    for file in tmp_path.iterdir():
        file.write_text("{", encoding="utf-8")  # cut short
    repaired = largest_microbatch(make, plan, 1 << 30, cache=tmp_path)
    assert repaired.compilations == 2
    monkeypatch.setattr(jax, "__version__", "99")
    assert largest_microbatch(make, plan, 1 << 30, cache=tmp_path).compilations == 2
    other = network(40)
    assert largest_microbatch(other, plan, 1 << 30, cache=tmp_path).compilations == 2

"""The judgement: what passes, what does not, and which quantity is named first."""

import math

import numpy as np
import pytest

from jax_accum.crosscheck.compare import Finding, References, first_failure, judge, worst
from jax_accum.crosscheck.trace import COUNTERS, Trace
from jax_accum.testing._rule import FACTOR

TRUTH = np.linspace(1.0, 2.0, 50)
COUNTS = dict.fromkeys(COUNTERS, 3)


def trace(error=0.0, updates=2, **changes):
    """A run whose every quantity is off by the relative ``error``."""
    made = Trace(counters=dict(COUNTS))
    for update in range(updates):
        arrays = {"w": TRUTH * (1 + error), "b": TRUTH[:5] * (1 + error)}
        made.add((3.0 - update) * (1 + error), 2.0 * (1 + error), arrays, arrays)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def judged(jax, torch=None, dtype="float32", undivided=1e-6):
    exact = References(trace(undivided), trace())
    return judge(dtype, jax, torch or trace(undivided), exact, exact, COUNTS)


def test_four_times_the_undivided_error_passes_and_more_does_not():
    assert first_failure(judged(trace(3.9e-6))) is None
    failure = first_failure(judged(trace(4.1e-6)))
    assert (failure.quantity, failure.side, failure.update) == ("loss", "JAX", 1)
    assert failure.error == pytest.approx(4.1e-6)
    assert failure.allowed == pytest.approx(FACTOR * 1e-6)


def test_the_side_that_is_wrong_is_named():
    failure = first_failure(judged(trace(1e-6), torch=trace(1e-4)))
    assert failure.side == "PyTorch"


def test_where_the_undivided_run_is_exact_a_few_roundings_still_pass():
    assert first_failure(judged(trace(2.0**-24), trace(), undivided=0.0)) is None
    assert first_failure(judged(trace(2.0**-19), trace(), undivided=0.0)) is not None


def test_in_float64_the_two_agree_to_a_millionth_of_a_millionth():
    kept = trace().parameters
    near = trace(0.9e-12, parameters=kept)
    far = trace(1.1e-12, parameters=kept)
    assert first_failure(judged(near, trace(), dtype="float64")) is None
    assert first_failure(judged(far, trace(), dtype="float64")).quantity == "loss"


def test_in_float64_parameters_are_held_to_float32_rounding_scaled_down():
    finer = 2.0**-29  # from float32's unit roundoff to float64's
    for error, passes in ((3.9e-6 * finer, True), (4.2e-6 * finer, False)):
        run = trace()
        for arrays in run.parameters:
            for name in arrays:
                arrays[name] = arrays[name] * (1 + error)
        found = judged(trace(parameters=run.parameters), trace(), dtype="float64")
        assert (first_failure(found) is None) == passes


def test_models_that_differ_undivided_are_told_apart_from_accumulation():
    ours, theirs = References(trace(1e-6), trace()), References(trace(1e-6), trace(1e-9))
    failure = first_failure(judge("float32", trace(), trace(1e-9), ours, theirs, COUNTS))
    assert "undivided" in failure.side


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_is_off_by_one_differs(name):
    failure = first_failure(judged(trace(counters=COUNTS | {name: 4})))
    assert (failure.quantity, failure.error, failure.ratio) == (f"counter {name}", 1.0, math.inf)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["losses", "norms"])
def test_a_number_that_is_not_finite_differs(field, bad):
    failure = first_failure(judged(trace(**{field: [bad, bad]})))
    assert failure.ratio == math.inf


def test_nan_in_one_parameter_of_the_gradient_names_it():
    gradient = {"w": TRUTH, "b": np.full(5, math.nan)}
    failures = [f for f in judged(trace(gradient=gradient)) if not f.passed and f.parameter]
    assert {failure.parameter for failure in failures} == {"b"}


def test_one_wrong_parameter_is_found_though_the_tree_passes():
    small = TRUTH[:5] * (1 + 1e-5)
    found = judged(trace(gradient={"w": TRUTH, "b": small}))
    tree = [f for f in found if f.quantity == "gradient" and not f.parameter and f.side == "JAX"]
    assert all(f.passed for f in tree)
    assert first_failure(found).parameter == "b"


def test_a_parameter_whose_gradient_is_only_rounding_is_measured_against_the_tree():
    def made(zero):
        return trace(gradient={"w": TRUTH, "zero": np.full(5, zero)})

    exact = References(made(1e-18), made(1e-18))
    found = judge("float32", made(-3e-18), made(1e-18), exact, exact, COUNTS)
    assert first_failure(found) is None
    assert {finding.parameter for finding in found} == {None, "w", "zero"}


def test_rounding_at_the_size_of_a_microbatch_counts_as_the_frameworks_own():
    pieces = trace(0.1 + 1e-5), trace(0.1)
    exact = References(trace(1e-6), trace(), pieces=pieces)
    for error, passes in ((3.5e-5, True), (4.5e-5, False)):
        found = judge("float32", trace(error), trace(), exact, exact, COUNTS)
        assert (first_failure(found) is None) == passes


def test_microbatches_that_are_not_finite_leave_the_room_that_the_undivided_batch_gives():
    exact = References(trace(1e-6), trace(), pieces=(trace(math.nan), trace()))
    for error, passes in ((3.9e-6, True), (4.1e-6, False)):
        found = judge("float32", trace(error), trace(), exact, exact, COUNTS)
        assert (first_failure(found) is None) == passes


def test_the_first_failure_is_the_first_of_the_run_and_not_the_largest():
    run = trace(1e-6)
    run.losses[1] *= 1 + 1e-3
    run.norms[0] *= 1 + 1e-5
    found = judged(run)
    assert (first_failure(found).quantity, first_failure(found).update) == ("gradient norm", 1)
    assert (worst(found).quantity, worst(found).update) == ("loss", 2)


def test_counters_are_the_worst_only_where_nothing_measured_failed():
    counters = COUNTS | {"updates": 9}
    assert worst(judged(trace(counters=counters))).quantity == "counter updates"
    assert worst(judged(trace(1e-3, counters=counters))).quantity != "counter updates"


def test_a_finding_reads_as_a_place():
    finding = Finding("gradient", "JAX", 1, 1.0, 0.5, "head/kernel")
    assert finding.place == "gradient of head/kernel at update 1 (JAX)"

"""Runs at a small size: what is right is judged equal, and every planted fault is caught."""

import numpy as np
import pytest

from jax_accum.crosscheck.cases import Case
from jax_accum.crosscheck.corpus import default_documents
from jax_accum.crosscheck.data import WINDOW
from jax_accum.crosscheck.faults import FAULTS, Fault
from jax_accum.crosscheck.gpt import GPTSizes
from jax_accum.crosscheck.run import Crosscheck
from jax_accum.testing._rule import distances

SMALL = GPTSizes(max_length=WINDOW, layers=1, heads=2, width=8)
RAGGED = Case("across", 4, "adamw", "float32", ragged=True)


@pytest.fixture(scope="module")
def crosscheck():
    return Crosscheck(default_documents(), updates=2, seed=1, sizes=SMALL)


@pytest.fixture
def planted(crosscheck):
    """The same run with a fault in it; undivided runs are shared."""

    def plant(fault):
        crosscheck.fault = fault
        return crosscheck

    yield plant
    crosscheck.fault = None


@pytest.mark.parametrize(
    "case",
    [
        Case("across", 1, "adamw", "float32"),
        Case("across", 4, "sgd", "float64", ragged=True),
        Case("across", 8, "adamw", "float32", ragged=True),
        Case("across", 3, "adamw", "float64"),
        Case("inone", 1, "sgd", "float32"),
        Case("inone", 4, "adamw", "float64", ragged=True),
        Case("inone", 8, "sgd", "float32", ragged=True),
        Case("inone", 3, "adamw", "float32"),
    ],
    ids=lambda case: case.name,
)
def test_jax_and_pytorch_train_the_same(crosscheck, case):
    result = crosscheck.compare(case)
    assert result.failure is None, result.failure.place
    assert result.counters["JAX"] == result.counters["PyTorch"] == result.counters["expected"]
    assert result.jax["accumulated"][1] < result.jax["accumulated"][0]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_planted_fault_is_caught_on_the_side_where_it_is(planted, fault, dtype):
    case = Case("across", 4, "adamw", dtype, ragged=True)
    assert fault.shows_in(case)
    result = planted(fault).compare(case)
    assert not result.equal
    assert result.failure.side == "JAX"
    assert all(finding.passed for finding in result.findings if finding.side == "PyTorch")


def test_the_loop_that_faults_are_planted_in_is_right_without_one(planted):
    nothing = Fault("correct", "no mistake", lambda case: True)
    assert planted(nothing).compare(RAGGED).equal


def test_a_fault_that_cannot_show_in_a_case_is_judged_equal_there(planted):
    whole = Case("across", 1, "sgd", "float64")
    assert not FAULTS["mean-of-means"].shows_in(whole)
    assert planted(FAULTS["mean-of-means"]).compare(whole).equal


def test_plain_runs_are_made_once_for_all_cases_that_can_share_them(crosscheck):
    def references(way, count, dtype):
        case = Case(way, count, "sgd", dtype)
        return crosscheck.references(case, crosscheck.groups(case))

    for one, other, same in zip(
        references("across", 4, "float32"),
        references("inone", 8, "float64"),
        references("inone", 4, "float64"),
        strict=True,
    ):
        assert one.float64 is other.float64 is same.float64
        assert one.pieces is same.pieces
        assert one.pieces[1] is not other.pieces[1]


def test_microbatches_put_together_are_the_undivided_batch_in_float64(crosscheck):
    case = Case("across", 4, "adamw", "float64", ragged=True)
    for side in crosscheck.references(case, crosscheck.groups(case)):
        (_, pieces), whole = side.pieces, side.float64
        np.testing.assert_allclose(pieces.losses, whole.losses, rtol=1e-12)
        np.testing.assert_allclose(pieces.norms, whole.norms, rtol=1e-12)
        assert distances(pieces.gradient, whole.gradient).tree < 1e-12


def test_a_batch_that_is_not_cut_is_its_own_measure(crosscheck):
    case = Case("across", 1, "sgd", "float32")
    assert [s.pieces for s in crosscheck.references(case, crosscheck.groups(case))] == [None, None]


def test_a_run_ends_up_in_the_order_of_the_matrix_whatever_was_done_first():
    crosscheck = Crosscheck(default_documents(), updates=1, sizes=SMALL)
    cases = [Case("across", count, "sgd", "float32") for count in (8, 1, 4)]
    done = []
    crosscheck.compare_all(cases, done.append)
    assert [result.case for result in crosscheck.results] == cases
    assert {result.case for result in done} == set(cases)


def test_the_same_seed_gives_the_same_numbers_and_another_gives_others():
    case = Case("across", 4, "sgd", "float32")
    losses = [
        Crosscheck(default_documents(), 1, seed, sizes=SMALL).compare(case).jax["accumulated"]
        for seed in (3, 3, 4)
    ]
    assert losses[0] == losses[1] != losses[2]

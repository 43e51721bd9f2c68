"""The matrix: what it holds, what its names say, and which names are unknown."""

import itertools

import pytest

from jax_accum.crosscheck.cases import Case, make_matrix, select
from jax_accum.crosscheck.errors import InputError
from jax_accum.crosscheck.faults import FAULTS, find_fault


def test_names_are_unique_and_every_value_of_every_axis_meets_every_other():
    matrix = make_matrix()
    assert len({case.name for case in matrix}) == len(matrix)
    axes = {
        "way": ["across", "inone"],
        "microbatches": [1, 4, 8],
        "optimizer": ["sgd", "adamw"],
        "dtype": ["float32", "float64"],
        "ragged": [False, True],
    }
    for one, other in itertools.combinations(axes, 2):
        met = {(getattr(case, one), getattr(case, other)) for case in matrix}
        missing = set(itertools.product(axes[one], axes[other])) - met
        # A group that is not cut has no ragged cases.
        assert missing <= {(1, True)}, (one, other)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 11])
def test_a_full_group_is_cut_into_that_many_microbatches(count):
    case = Case("across", count, "sgd", "float32")
    assert case.examples_per_update >= 8
    assert -(-case.examples_per_update // case.microbatch_size) == count
    assert case.last_microbatches == count


def test_the_ragged_group_of_the_matrix_has_fewer_microbatches_and_a_short_one():
    case = Case("across", 4, "sgd", "float32", ragged=True)
    assert (case.last_examples, case.last_microbatches, case.microbatch_size) == (5, 3, 2)


@pytest.mark.parametrize("count", [0, -4, 257])
def test_a_number_of_microbatches_out_of_range_is_named(count):
    with pytest.raises(InputError, match=f"--microbatches must be from 1 to 256, got {count}"):
        make_matrix([4, count])


def test_an_unknown_case_is_answered_with_its_neighbours():
    with pytest.raises(InputError, match=r"unknown case 'sgd-float32-a4'.*sgd-float32-a4-"):
        select(make_matrix(), ["sgd-float32-a4"])
    with pytest.raises(InputError, match="--list shows all"):
        select(make_matrix(), [""])


def test_an_unknown_fault_is_answered_with_its_neighbours():
    with pytest.raises(InputError, match="did you mean mean-of-means"):
        find_fault("mean-of-mean")


def test_every_fault_shows_in_some_case_of_the_matrix():
    for fault in FAULTS.values():
        assert any(fault.shows_in(case) for case in make_matrix()), fault.name

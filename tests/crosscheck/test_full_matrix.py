"""The full matrix: what it covers, that it is judged equal, and that faults in it are caught."""

import dataclasses
import itertools

import numpy as np
import pytest

from jax_accum.crosscheck import full_run, torch_fault_ddp
from jax_accum.crosscheck.compare import first_failure
from jax_accum.crosscheck.corpus import default_documents
from jax_accum.crosscheck.data import ordered_examples
from jax_accum.crosscheck.faults import ALL_FAULTS, FAULTS, TORCH_FAULTS, Fault
from jax_accum.crosscheck.full_data import expected_counters, expected_scales, full_groups
from jax_accum.crosscheck.full_run import FullMatrix, ProcessesError
from jax_accum.crosscheck.gpt import GPTSizes
from jax_accum.crosscheck.matrix import AXES, FullCase, full_matrix, needs_devices
from jax_accum.crosscheck.run import Crosscheck
from torch_ref.launch import spawn

PLAIN = FullCase("across", "loop", "a3", "adamw", "float32", "ragged", "one")
SCALED = FullCase("inone", "loop", "a8", "adamw", "float16", "full", "one")
IN_TWO = FullCase("inone", "ddp", "a3", "adafactor", "float32", "full", "three")
ON_DEVICES = """
import sys
from jax_accum.crosscheck.compare import first_failure
from jax_accum.crosscheck.corpus import default_documents
from jax_accum.crosscheck.data import ordered_examples
from jax_accum.crosscheck.full_run import FullMatrix
from jax_accum.crosscheck.matrix import full_matrix

if __name__ == "__main__":
    cases = [case for case in full_matrix() if case.name in sys.argv[1:]]
    matrix = FullMatrix(ordered_examples(default_documents(), 0), 0, cases)
    for case in cases:
        failure = first_failure(matrix.findings(case)[0])
        print(case.name, "equal" if failure is None else failure.place)
"""


@pytest.fixture(scope="module")
def examples():
    return ordered_examples(default_documents(), seed=0)


@pytest.fixture(scope="module")
def matrix(examples):
    return FullMatrix(examples, seed=0, planned=[])


def test_every_pair_of_values_of_two_axes_occurs_in_some_case():
    met = {
        (one, a, other, b)
        for case in full_matrix()
        for (one, a), (other, b) in itertools.combinations(dataclasses.asdict(case).items(), 2)
    }
    wanted = {
        (one, a, other, b)
        for one, other in itertools.combinations(AXES, 2)
        for a, b in itertools.product(AXES[one], AXES[other])
    }
    assert len(AXES) == 7
    assert met == wanted


def test_the_choice_is_small_its_names_are_unique_and_every_case_is_possible():
    cases = full_matrix()
    assert len({case.name for case in cases}) == len(cases) < 30
    assert all(case.possible for case in cases)
    assert needs_devices(cases)
    assert not needs_devices([PLAIN, SCALED])


def test_every_fault_of_either_side_can_show_in_a_case_of_the_full_matrix():
    for fault in ALL_FAULTS.values():
        assert any(fault.shows_in(case) for case in full_matrix()), fault.name


@pytest.mark.parametrize("case", full_matrix(), ids=lambda case: case.name)
def test_the_groups_of_a_case_are_what_its_name_says(case, examples):
    groups = full_groups(case, examples)
    for replicas in {case.jax_replicas, case.torch_replicas}:
        turns = groups[0].pieces(case.microbatches, replicas)
        assert len(turns) == case.microbatches
        rows = np.concatenate([piece["tokens"] for turn in turns for piece in turn])
        assert np.array_equal(rows, groups[0].arrays["tokens"])
    pieces = [
        piece
        for replicas in {case.jax_replicas, case.torch_replicas}
        for turn in groups[0].pieces(case.microbatches, replicas)
        for piece in turn
    ]
    empty = [not piece["mask"].any() for piece in pieces]
    assert any(empty) == (case.group == "ignored")
    assert groups[0].tokens > 0
    assert [g.skip for g in groups].count("empty") == (case.group == "skipped")
    assert [g.skip for g in groups].count("nonfinite") == (case.dtype == "float16")
    assert (groups[-1].rows < groups[0].rows) == (case.group == "ragged")


def test_the_scale_halves_after_an_overflow_doubles_after_clean_groups_and_rests_otherwise(
    examples,
):
    case = FullCase("across", "ddp", "a8", "adafactor", "float16", "skipped", "three")
    assert expected_scales(full_groups(case, examples)) == [1024.0, 1024.0, 512.0, 512.0]
    assert expected_scales(full_groups(SCALED, examples)) == [1024.0, 1024.0, 512.0, 512.0]


def test_microbatches_are_counted_by_the_rows_that_replicas_have(examples):
    groups = full_groups(FullCase("jit", "ddp", "a8", "sgd", "float32", "ragged", "one"), examples)
    count = expected_counters(groups, 8, 2, to_last_weight=False)["microbatches"]
    assert count == 3 * 16 + 9  # 27 examples by threes: five on one replica, four on the other


def test_jax_and_pytorch_train_the_same_under_a_loss_scale_with_an_overflow(matrix):
    findings, ours, theirs, *_ = matrix.findings(SCALED)
    assert first_failure(findings) is None
    assert ours.scales == theirs.scales == [1024.0, 1024.0, 512.0, 512.0]
    assert ours.counters["skipped_nonfinite"] == theirs.counters["skipped_nonfinite"] == 1


def test_devices_and_processes_of_both_sides_train_the_same(run_python):
    names = [
        "jit-ddp-a3-sgd-float64-ragged-three",
        "pmap-ddp-a1-sgd-float32-skipped-one",
        "shardmap-loop-a3-sgd-float16-full-one",
    ]
    said = run_python(ON_DEVICES, *names, devices=2).split("\n")
    assert said[:-1] == [f"{name} equal" for name in names]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_jax_is_caught_on_that_side(matrix, fault):
    failure = first_failure(matrix.findings(PLAIN, fault)[0])
    assert fault.shows_in(PLAIN)
    assert failure.side == "JAX"


@pytest.mark.parametrize(
    "fault",
    [fault for fault in TORCH_FAULTS.values() if fault.shows_in(PLAIN)],
    ids=lambda fault: fault.name,
)
def test_a_fault_in_pytorch_is_caught_on_that_side(matrix, fault):
    failure = first_failure(matrix.findings(PLAIN, fault)[0])
    assert failure.side == "PyTorch"


@pytest.mark.parametrize("side", ["JAX", "PyTorch"])
def test_the_loops_that_faults_are_planted_in_are_right_without_one(matrix, side):
    name = "correct" if side == "JAX" else "torch-correct"
    nothing = Fault(name, "no mistake", lambda case: True, side=side)
    assert first_failure(matrix.findings(PLAIN, nothing)[0]) is None


def test_a_gradient_that_is_unscaled_in_every_microbatch_is_caught(matrix):
    fault = TORCH_FAULTS["torch-unscale-per-microbatch"]
    assert fault.shows_in(SCALED)
    failure = first_failure(matrix.findings(SCALED, fault)[0])
    assert (failure.quantity, failure.side, failure.update) == ("gradient", "PyTorch", 1)


def test_a_forward_pass_outside_no_sync_is_caught_by_the_count_of_reductions(matrix):
    fault = TORCH_FAULTS["torch-forward-outside-no-sync"]
    assert fault.shows_in(IN_TWO)
    findings, _, theirs, *_ = matrix.findings(IN_TWO, fault)
    failures = [finding for finding in findings if not finding.passed]
    assert {failure.quantity for failure in failures} == {"counter gradient reductions"}
    assert theirs.counters["gradient reductions"] == 4 * 3  # A in each of four updates


def test_the_loop_in_two_processes_is_right_with_its_forward_pass_inside_no_sync(matrix):
    groups = matrix.groups(IN_TWO)
    traces = spawn(torch_fault_ddp.run, 2, IN_TWO, matrix.torch_weights, groups, True)
    assert traces[0].counters["gradient reductions"] == 4


def test_processes_that_die_are_reported_and_not_started_again(examples, monkeypatch):
    started = []

    def dies(function, replicas, *arguments, timeout):
        started.append(timeout)
        raise RuntimeError("replica 1 died, exit status -9")

    monkeypatch.setattr(full_run, "spawn", dies)
    sizes = GPTSizes(max_length=64, layers=1, heads=2, width=8)
    crosscheck = Crosscheck(default_documents(), updates=1, sizes=sizes)
    other = dataclasses.replace(IN_TWO, cut="a1")
    crosscheck.compare_all([IN_TWO, other])
    assert len(started) == 1
    assert started[0] <= 300
    for result in crosscheck.results:
        assert not result.equal
        assert result.trouble == "replica 1 died, exit status -9"
    with pytest.raises(ProcessesError, match="exit status -9"):
        crosscheck.full([]).run_torch(IN_TWO, crosscheck.full([]).groups(IN_TWO))

"""audit_ids: what was processed twice, by whom, and what never."""

import numpy as np
import pytest

import jax_accum as ja


def test_a_clean_epoch_says_so():
    stream = ja.groups(
        [{"x": np.arange(11)}], ja.BatchPlan(microbatch_size=1, microbatches=2, replicas=2)
    )
    audit = ja.audit_ids(list(stream), expected=range(11), strict=True)
    assert audit.ok
    assert audit.describe() == "11 examples in 3 groups, each processed once."


@pytest.mark.parametrize(
    ("groups", "expected", "field", "found"),
    [
        ([[["a", "a"], ["b"]]], None, "within_replica", {"a": [(0, 0), (0, 0)]}),
        ([[["a"], ["b", "a"]]], None, "across_replicas", {"a": [(0, 0), (0, 1)]}),
        ([[["a"], ["b"]], [["c"], ["b"]]], None, "across_groups", {"b": [(0, 1), (1, 1)]}),
        ([[["a"], ["b"]]], "abc", "missing", ("c",)),
        ([[["a"], ["x"]]], "a", "unexpected", ("x",)),
    ],
    ids=[
        "twice by one replica",
        "by two replicas",
        "in two groups",
        "never, though expected",
        "though not expected",
    ],
)
def test_each_fault_is_found_as_what_it_is_and_nothing_else(groups, expected, field, found):
    audit = ja.audit_ids(groups, expected=expected)
    assert not audit.ok
    assert getattr(audit, field) == found
    others = {"within_replica", "across_replicas", "across_groups", "missing", "unexpected"}
    assert not any(getattr(audit, other) for other in others - {field})
    with pytest.raises(ja.AuditError, match=repr(next(iter(found)))) as caught:
        ja.audit_ids(groups, expected=expected, strict=True)
    assert caught.value.audit == audit


def test_padding_is_no_example():
    audit = ja.audit_ids([[["a", None], [None, None]]], expected="a")
    assert (audit.ok, audit.examples) == (True, 1)


def test_the_shards_of_several_processes_are_audited_together():
    plan = ja.BatchPlan(microbatch_size=2, microbatches=1, replicas=4)

    def of(index):
        return list(ja.groups([{"x": np.arange(13)}], plan, process_index=index, process_count=2))

    assert ja.audit_ids(of(0), of(1), expected=range(13), strict=True).examples == 13
    # Both believe that they are the first.
    with pytest.raises(ValueError, match=r"two processes report for the replicas \[0, 1\]"):
        ja.audit_ids(of(0), of(0))
    # One alone leaves half of the examples out.
    assert ja.audit_ids(of(0), expected=range(13)).missing == (4, 5, 6, 7, 12)


def test_a_process_that_reads_what_another_has_is_found():
    mine = [{0: ["a", "b"]}]
    theirs = [{1: ["a", "b"]}]  # the same part, though it is replica 1
    assert list(ja.audit_ids(mine, theirs).across_replicas) == ["a", "b"]


def test_processes_of_different_length_are_refused():
    with pytest.raises(ValueError, match="different numbers of groups: 1, 2"):
        ja.audit_ids([{0: ["a"]}], [{1: ["b"]}, {1: ["c"]}])
    with pytest.raises(ValueError, match="ids is missing"):
        ja.audit_ids()


def test_a_long_report_is_cut():
    audit = ja.audit_ids([[range(30), range(30)]])
    assert "30 processed by several replicas in one group, the first 10:" in audit.describe()
    assert audit.describe().count("group 0 replica 1") == 10

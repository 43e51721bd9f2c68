"""groups: input that cannot be right is refused, by name."""

import numpy as np
import pytest

import jax_accum as ja

PLAN = ja.BatchPlan(microbatch_size=2, microbatches=2)


def x(*values):
    return {"x": np.array(values)}


def with_id(*ids):
    return {"x": np.arange(len(ids)), "id": list(ids)}


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "batches holds no examples"),
        (iter(()), {}, "make a new one for each epoch"),
        ([x(1), {"y": np.ones(1)}], {}, r"batch 1 has the leaves \['y'\], .* \['x'\]"),
        (
            [x(1), {"x": np.ones((1, 2), int)}],
            {},
            r"'x' of batch 1 has shape \('rows', 2\) .* \('rows',\)",
        ),
        ([x(1), x(1.0)], {}, "'x' of batch 1 .* float64, .* int64"),
        ([{"x": np.ones(2), "y": np.ones(3)}], {}, "differ in their number of rows: 2 .* 3"),
        ([{"x": 1}], {}, "'x' of batch 0 is a scalar: .* batched=False"),
        ([{}], {}, "batch 0 holds no arrays"),
        ([x(1)], {"ids": "id"}, r"batch 0 has no IDs: ids='id' .* \['x'\]"),
        ([np.ones(2)], {"ids": "id"}, "batch 0 has no IDs: .* no keys"),
        ([with_id("a", None)], {"ids": "id"}, r"batch 0 has no ID \(None\) in row 1"),
        ([{"x": np.ones(2), "id": ["a"]}], {"ids": "id"}, "1 IDs for 2 examples"),
        ([{"x": np.ones(2), "id": None}], {"ids": "id"}, "batch 0 has None for its IDs"),
        (
            [with_id("a", "b"), with_id("c", "a")],
            {"ids": "id"},
            "batch 1 repeats the ID 'a': .* number 0 and 3 of this stream",
        ),
        ([with_id(["a"], ["b"])], {"ids": "id"}, "ID of type list: use a str, int or tuple"),
        ([np.ones(3)], {}, r"padding names \['mask'\], but a batch has the leaves \[''\]"),
        ([x(1)], {"padding": {"labels": -100}}, r"padding names \['labels'\]"),
        ([x(1)], {"padding": {}}, "padding must name a leaf"),
        ([x(1)], {"last": "keepp"}, "last must be one of keep, drop, error, got 'keepp'"),
        ([x(1, 2, 3)], {"last": "error"}, r"3 of the 4 examples of a group \(IDs 0, 1, 2\)"),
        ([x(1)], {"skip": -1}, "skip must be a number of examples"),
        ([x(1)], {"skip": True}, "skip must be a number of examples"),
        ([x(1, 2)], {"skip": 3}, "skip=3, but the stream has 2 examples"),
        ([x(1)], {"process_count": 2, "process_index": 0}, "2 processes cannot share 1 replicas"),
        ([x(1)], {"process_count": 1, "process_index": 1}, "process_index must be from 0 to 0"),
        ([x(1)], {"weight": lambda b: 1}, r"one number per example, shape \(1,\); got \(\)"),
        ([x(1, 2)], {"weight": lambda b: [1, -1]}, "weight returned -1 for example 1"),
        ([x(1)], {"weight": lambda b: [np.nan]}, "weight returned nan for example 0"),
        ([x(1)], {"lengths": [4]}, "lengths= needs single examples"),
        ([x(1)], {"batched": False, "lengths": [4, 2]}, "lengths must rise"),
        (
            [x(1, 2, 3)],
            {"batched": False, "lengths": [2]},
            "example 0 has length 3, and the largest of lengths is 2",
        ),
        (
            [{"x": np.ones(2), "y": np.ones(3)}],
            {"batched": False, "lengths": [4]},
            "example 0 has leaves of the lengths {'x': 2, 'y': 3}",
        ),
    ],
    ids=[
        "an empty list",
        "a used-up iterator",
        "other leaves",
        "another shape",
        "another dtype",
        "leaves of different lengths",
        "scalars for batches",
        "a batch of nothing",
        "IDs missing from a dict",
        "IDs asked of an array",
        "an ID that is None",
        "fewer IDs than examples",
        "None for IDs",
        "an ID twice",
        "an ID that cannot be hashed",
        "an array without a mask",
        "labels that are missing",
        "no padding leaf at all",
        "an unknown policy",
        "a short group where that is an error",
        "skip below 0",
        "skip as a truth value",
        "skip beyond the stream",
        "processes that do not divide the replicas",
        "a process number out of range",
        "a weight for the whole batch",
        "a negative weight",
        "a weight that is NaN",
        "lengths for batches",
        "lengths that fall",
        "an example longer than all lengths",
        "leaves of one example of different lengths",
    ],
)
def test_a_wrong_value_is_named(batches, options, message):
    with pytest.raises(ValueError, match=message):
        list(ja.groups(batches, PLAN, **options))


@pytest.mark.parametrize(
    ("batches", "plan", "message"),
    [
        (3, PLAN, "batches must be an iterable of batches, got int"),
        (x(1), PLAN, "got one mapping"),
        ([x(1)], (2, 2), "plan must be a jax_accum.BatchPlan, got tuple"),
        ([{"x": np.array(["a"])}], PLAN, "no device can take. .* name their key: ids="),
        ([{"x": [object()]}], PLAN, "dtype object"),
    ],
    ids=["a number", "a batch instead of batches", "a tuple as plan", "text", "objects"],
)
def test_a_wrong_type_is_named(batches, plan, message):
    with pytest.raises(TypeError, match=message):
        list(ja.groups(batches, plan))


def test_the_groups_before_the_fault_are_handed_out():
    stream = ja.groups([x(1, 2, 3, 4), {"y": np.ones(4)}], PLAN)
    assert next(stream).examples == 4
    with pytest.raises(ValueError, match="batch 1"):
        next(stream)


def test_a_used_up_generator_is_no_second_epoch():
    batches = iter([x(1, 2, 3, 4)])
    assert len(list(ja.groups(batches, PLAN))) == 1
    with pytest.raises(ValueError, match="make a new one for each epoch"):
        list(ja.groups(batches, PLAN))


def example(number, **other):
    return {"x": np.arange(3), "id": f"e{number}"} | other


@pytest.mark.parametrize("lengths", [None, [4]], ids=["of one length", "padded"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (example(0), "example 2 repeats the ID 'e0': .* number 0 and 2"),
        (example(2, id=None), r"example 2 has no ID \(None\)"),
        ({"x": np.arange(3)}, "example 2 has no IDs"),
        (example(2, x=np.arange(3.0)), "'x' of example 2 .* float64, .* int64"),
        (example(2, x=np.ones((3, 2), int)), "'x' of example 2 has shape "),
        (example(2, y=np.ones(3)), r"example 2 has the leaves \['x', 'y'\]"),
        ({"y": np.arange(3), "id": "e2"}, r"example 2 has the leaves \['y'\]"),
        (example(2, x="a"), "example 2 holds str of dtype"),
    ],
    ids=[
        "an ID repeated",
        "an ID None",
        "no ID",
        "another dtype",
        "another shape",
        "a leaf more",
        "another leaf",
        "no array",
    ],
)
def test_a_later_example_that_is_unlike_the_first_is_named(other, message, lengths):
    stream = [example(0), example(1), other, example(3)]
    with pytest.raises((ValueError, TypeError), match=message):
        list(ja.groups(stream, PLAN, batched=False, ids="id", lengths=lengths))


def test_ids_of_numpy_are_known_again_as_the_numbers_they_are():
    stream = [example(i, id=np.int64(i)) for i in (7, 8, 9, 7)]
    with pytest.raises(ValueError, match=r"repeats the ID 7: .* number 0 and 3"):
        list(ja.groups(stream, PLAN, batched=False, ids="id"))
    (group,) = ja.groups(stream[:3], PLAN, batched=False, ids="id")
    assert [(type(name), name) for name in group.ids] == [(int, 7), (int, 8), (int, 9)]

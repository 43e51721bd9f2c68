"""groups: what is in each group, where it lies, what the end of the stream becomes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_accum as ja


def stream_of(lengths, rows):
    """Batches of up to `rows` rows: token i of example e is 100 e + i; masks of these lengths."""
    width = max([*lengths, 1])
    for start in range(0, len(lengths), rows):
        own = np.array(lengths[start : start + rows])
        numbers = np.arange(start, start + len(own))
        yield {
            "tokens": 100 * numbers[:, None] + np.arange(width),
            "mask": np.arange(width) < own[:, None],
            "id": np.array([f"e{n}" for n in numbers]),
        }


def plan_of(m, a, d=1):
    return ja.BatchPlan(microbatch_size=m, microbatches=a, replicas=d)


def supervised_rows(group):
    """The examples that weigh something, by their tokens."""
    return sorted(group.batch["tokens"][..., 0][group.batch["mask"].any(axis=-1)] // 100)


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    rows=st.integers(1, 9),
    m=st.integers(1, 4),
    a=st.integers(1, 4),
    d=st.integers(1, 4),
    last=st.sampled_from(["keep", "drop", "error"]),
    processes=st.sampled_from([1, 2]),
)
def test_every_example_is_trained_once_or_reported(lengths, rows, m, a, d, last, processes):
    plan = plan_of(m, a, d * processes)
    n, size = len(lengths), plan.examples_per_update
    parts = [
        ja.groups(
            stream_of(lengths, rows),
            plan,
            last,
            ids="id",
            process_index=p,
            process_count=processes,
        )
        for p in range(processes)
    ]
    if last == "error" and n % size:
        for part in parts:
            with pytest.raises(ValueError, match=f"ends with {n % size} of the {size}"):
                list(part)
        return
    made = [list(part) for part in parts]
    names = [f"e{i}" for i in range(n)]
    trained = n - n % size if last == "drop" else n
    assert parts[0].dropped == ja.Dropped(n - trained, tuple(names[trained:]))
    assert [name for group in made[0] for name in group.ids] == names[:trained]
    assert sum(group.examples for group in made[0]) + parts[0].dropped.examples == n
    assert ja.audit_ids(*made, expected=names[:trained], strict=True).examples == trained
    for at, together in enumerate(zip(*made, strict=True)):
        first = together[0]
        own = range(at * size, min((at + 1) * size, trained))
        assert first.position == own.stop
        assert first.partial == (len(own) < size)
        assert first.padding == size - len(own)
        assert first.weight == first.tokens == sum(lengths[i] for i in own)
        assert first.tokens + first.ignored == len(own) * first.batch["mask"].shape[-1]
        shape = (a, m * d, first.batch["mask"].shape[-1])
        for part in together:
            assert part.batch["tokens"].shape == part.batch["mask"].shape == shape
            assert (part.ids, part.tokens) == (first.ids, first.tokens)
        assert sum(int(part.batch["mask"].sum()) for part in together) == first.tokens
        seen = sorted(i for part in together for i in supervised_rows(part))
        assert seen == [i for i in own if lengths[i]]


@pytest.mark.parametrize("d", [1, 2, 4])
def test_a_full_group_lies_as_the_split_of_the_flat_batch_would(d):
    plan = plan_of(3, 2, d)
    n = plan.examples_per_update
    (group,) = ja.groups([{"x": np.arange(n)}], plan)
    rows = ja.microbatch_rows(n, plan.microbatches, d)
    assert group.batch["x"].reshape(rows.shape).tolist() == rows.tolist()


@pytest.mark.parametrize("examples", range(1, 13))
def test_a_short_group_is_a_full_one_of_as_few_microbatches_as_hold_it(examples):
    plan = plan_of(1, 3, 4)
    (group,) = ja.groups([{"x": np.arange(examples)}], plan)
    turns = -(-examples // 4)
    rows = ja.microbatch_rows(4 * turns, turns, 4).reshape(turns, 4)
    has = group.batch["mask"]
    assert not has[turns:].any()
    assert has[:turns].tolist() == (rows < examples).tolist()
    assert group.batch["x"][:turns].tolist() == np.minimum(rows, examples - 1).tolist()
    assert group.microbatches == sum(
        max([a + 1 for a in range(turns) if rows[a, d] < examples], default=0) for d in range(4)
    )


@pytest.mark.parametrize(
    ("batches", "options"),
    [
        (lambda: [{"x": np.arange(7)}], {}),
        (lambda: ({"x": np.arange(i, i + 1)} for i in range(7)), {}),
        (lambda: ({"x": i} for i in range(7)), {"batched": False}),
        (lambda: [{"x": np.arange(4)}, {"x": np.arange(4, 4)}, {"x": np.arange(4, 7)}], {}),
    ],
    ids=["one batch", "batches of one", "single examples", "an empty batch in between"],
)
def test_groups_do_not_depend_on_where_batches_end(batches, options):
    made = list(ja.groups(batches(), plan_of(1, 3), **options))
    assert [group.batch["x"].ravel().tolist() for group in made] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 6, 6],
    ]
    assert [group.batch["mask"].ravel().tolist() for group in made][-1] == [True, False, False]


def test_sixty_three_microbatches_leave_nothing_to_the_next_epoch():
    stream = [{"x": np.arange(i, i + 1)} for i in range(63)]
    epochs = [list(ja.groups(stream, plan_of(1, 8))) for _ in range(2)]
    assert [group.examples for group in epochs[0]] == [8] * 7 + [7]
    assert [group.ids for group in epochs[1]] == [group.ids for group in epochs[0]]


def test_three_microbatches_of_four_are_reported_when_dropped(caplog):
    stream = ja.groups([{"x": np.arange(3)}], plan_of(1, 4), "drop")
    assert list(stream) == []
    assert stream.dropped == ja.Dropped(3, (0, 1, 2))
    assert "3 of 4 examples. It was the only one: nothing is trained" in caplog.text


def test_five_examples_on_two_replicas_are_padded_by_one_copy_that_is_reported():
    (group,) = ja.groups([{"x": np.arange(5)}], plan_of(3, 1, 2))
    assert group.batch["x"].tolist() == [[0, 1, 2, 3, 4, 4]]
    assert group.batch["mask"].tolist() == [[True] * 5 + [False]]
    assert (group.examples, group.padding, group.weight) == (5, 1, 5)
    assert group.microbatch_examples(0) == 5
    assert group.replica_ids == {0: (0, 1, 2), 1: (3, 4)}


def test_fewer_examples_than_replicas_weigh_what_they_are():
    (group,) = ja.groups([{"x": np.arange(2)}], plan_of(4, 2, 4))
    assert (group.examples, group.padding, group.weight, group.microbatches) == (2, 30, 2, 1)


@pytest.mark.parametrize("cut", [0, 4, 8, 12, 15])
def test_a_run_goes_on_behind_the_examples_that_are_skipped(cut):
    def batches():
        return stream_of([3] * 15, 4)

    whole = list(ja.groups(batches(), plan_of(2, 2), ids="id"))
    rest = list(ja.groups(batches(), plan_of(2, 2), ids="id", skip=cut))
    behind = [group for group in whole if group.position > cut]
    assert [group.ids for group in rest] == [group.ids for group in behind]
    assert [group.position for group in rest] == [group.position for group in behind]


def test_the_same_examples_are_in_each_update_on_any_number_of_replicas_and_processes():
    trained = {}
    for m, a, d, processes in [
        (2, 4, 1, 1),
        (2, 2, 2, 1),
        (1, 2, 4, 1),
        (2, 2, 2, 2),
        (1, 2, 4, 2),
    ]:
        parts = [
            list(
                ja.groups(
                    stream_of([1] * 29, 5),
                    plan_of(m, a, d),
                    process_index=p,
                    process_count=processes,
                    ids="id",
                )
            )
            for p in range(processes)
        ]
        trained[m, a, d, processes] = [
            sorted(name for part in update for ids in part.replica_ids.values() for name in ids)
            for update in zip(*parts, strict=True)
        ]
    one, *others = trained.values()
    assert [len(update) for update in one] == [8, 8, 8, 5]
    for other in others:
        assert other == one


def test_labels_say_padding_by_their_own_value():
    batch = {"labels": np.array([[1, -100], [2, 3], [4, 5]])}
    (group,) = ja.groups([batch], plan_of(2, 2), padding={"labels": -100})
    assert group.batch["labels"].tolist() == [[[1, -100], [2, 3]], [[4, 5], [-100, -100]]]
    assert (group.tokens, group.ignored) == (5, 1)
    assert set(group.batch) == {"labels"}


def test_a_tuple_is_padded_by_the_position_of_its_leaf():
    (group,) = ja.groups([(np.ones((1, 2)), np.array([7]))], plan_of(2, 1), padding={"1": -100})
    assert group.batch[1].tolist() == [[7, -100]]


def test_the_weight_may_be_told_and_is_counted_before_the_group_is_handed_out():
    tokens = np.arange(30).reshape(5, 6)
    stream = [{"tokens": tokens, "mask": np.arange(6) < np.array([[6], [1], [3], [0], [2]])}]
    made = list(ja.groups(stream, plan_of(1, 2), weight=ja.next_token_targets))
    assert [group.weight for group in made] == [5 + 0, 2 + 0, 1]
    # A microbatch without a target at the end of a replica's part is not computed.
    assert [group.microbatches for group in made] == [1, 1, 1]


def test_a_group_without_any_weight_is_still_a_group():
    stream = [{"x": np.ones(2), "mask": np.zeros(2, bool)}]
    (group,) = ja.groups(stream, plan_of(1, 2))
    assert (group.examples, group.weight, group.microbatches) == (2, 0, 0)


def test_a_microbatch_is_one_turn_of_all_replicas():
    (group,) = ja.groups([{"x": np.arange(8)}], plan_of(2, 2, 2))
    assert group.microbatch(1)["x"].tolist() == [2, 3, 6, 7]
    assert group.microbatch_examples(1) == 4


def test_jax_arrays_and_bfloat16_keep_their_dtype():
    import jax.numpy as jnp

    (group,) = ja.groups([{"x": jnp.ones((2, 3), jnp.bfloat16)}], plan_of(1, 2))
    assert group.batch["x"].dtype == jnp.bfloat16
    assert isinstance(group.batch["x"], np.ndarray)


@pytest.mark.parametrize("last", ["keep", "drop"])
def test_an_iterator_that_has_ended_stays_ended(last):
    stream = ja.groups([{"x": np.arange(3)}], plan_of(1, 4), last)
    assert len(list(stream)) == (last == "keep")
    assert list(stream) == []


def test_a_padding_leaf_inside_a_tree_is_named_by_its_path():
    batch = {"x": np.arange(3), "y": {"mask": np.array([1, 0, 1])}}
    (group,) = ja.groups([batch], plan_of(4, 1), padding={"y/mask": 0})
    assert group.batch["y"]["mask"].tolist() == [[1, 0, 1, 0]]
    assert (group.tokens, group.ignored) == (2, 1)


def test_a_mask_of_nans_counts_what_is_a_number():
    batch = {"y": np.array([1.0, np.nan, 3.0])}
    (group,) = ja.groups([batch], plan_of(2, 2), padding={"y": float("nan")})
    assert group.tokens == 2
    assert np.isnan(group.batch["y"]).tolist() == [[False, True], [False, True]]

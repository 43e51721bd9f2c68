"""groups of examples of varying length: padded to a few lengths, or packed into rows."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_accum as ja


def plan_of(m, a):
    return ja.BatchPlan(microbatch_size=m, microbatches=a)


def example(name, length):
    return {"tokens": np.arange(1, length + 1), "id": name}


def test_each_group_has_the_shortest_length_that_holds_its_longest_example():
    stream = [example(n, length) for n, length in enumerate([3, 4, 5, 2, 8, 1, 2])]
    made = list(ja.groups(stream, plan_of(2, 1), batched=False, ids="id", lengths=[4, 8, 16]))
    assert [group.batch["tokens"].shape[-1] for group in made] == [4, 8, 8, 4]
    assert [group.weight for group in made] == [7, 7, 9, 2]
    assert made[0].batch["tokens"].tolist() == [[[1, 2, 3, 0], [1, 2, 3, 4]]]
    assert made[0].batch["mask"].tolist() == [[[True, True, True, False], [True] * 4]]
    assert made[0].ignored == 1
    assert not made[3].batch["mask"][0, 1].any()


def test_leaves_are_filled_with_the_value_that_says_padding():
    stream = [{"x": np.ones((2, 3)), "labels": np.array([5, 6]), "kind": 7}]
    (group,) = ja.groups(
        stream, plan_of(1, 1), batched=False, lengths=[3], padding={"labels": -100}
    )
    assert group.batch["labels"].tolist() == [[[5, 6, -100]]]
    assert group.batch["x"][0, 0, 2].tolist() == [0, 0, 0]
    assert group.batch["kind"].tolist() == [[7]]
    assert group.weight == 2


def targets_of(row):
    batch = {name: row[name][None] for name in ("tokens", "segment_ids")}
    return ja.next_token_targets(batch)[0]


documents = st.lists(st.integers(2, 30), min_size=1, max_size=25)


@given(sizes=documents, length=st.integers(2, 12), open_rows=st.integers(1, 4))
def test_packing_keeps_every_target_once_and_none_across_documents(sizes, length, open_rows):
    # Token values tell the document and the place: every pair that is trained must be consecutive.
    texts = [1000 * d + np.arange(n) for d, n in enumerate(sizes)]
    rows = list(ja.pack_documents(enumerate(texts), length, open_rows=open_rows))
    pairs = []
    for row in rows:
        t, s, p = row["tokens"], row["segment_ids"], row["positions"]
        assert len(t) == len(s) == len(p) == length
        same = (s[1:] == s[:-1]) & (s[1:] != 0)
        pairs += list(zip(t[:-1][same], t[1:][same], strict=True))
        assert (p[1:][same] == p[:-1][same] + 1).all()
    wanted = [(x, x + 1) for text in texts for x in text[:-1]]
    assert sorted(pairs) == wanted
    names = [name for row in rows for name in row["id"]]
    assert len(set(names)) == len(names)
    counted = sum(targets_of(row) for row in rows)
    assert counted == len(wanted)


def test_three_documents_in_a_row_lose_one_target_at_each_boundary():
    (row,) = ja.pack_documents([("a", range(4)), ("b", range(3)), ("c", range(2))], 10)
    assert row["segment_ids"].tolist() == [1] * 4 + [2] * 3 + [3] * 2 + [0]
    (group,) = ja.groups(
        [row],
        plan_of(2, 1),
        batched=False,
        ids="id",
        padding={"segment_ids": 0},
        weight=ja.next_token_targets,
    )
    assert group.weight == 3 + 2 + 1
    assert group.ids == (("a#0", "b#0", "c#0"),)
    loss = ja.losses.next_token_cross_entropy(
        jnp.zeros((2, 10, 4)),
        jnp.asarray(group.batch["tokens"][0]),
        segment_ids=jnp.asarray(group.batch["segment_ids"][0]),
    )
    assert int(loss.weight) == group.weight


def test_few_rows_are_open_and_the_fullest_leaves_first():
    rows = [
        r["id"] for r in ja.pack_documents([(n, range(n)) for n in (4, 5, 3, 2)], 6, open_rows=2)
    ]
    assert rows == [("5#0",), ("4#0", "2#0"), ("3#0",)]


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=6),
    ignored=st.lists(st.booleans(), min_size=54, max_size=54),
    boundary=st.integers(0, 9),
    whole_rows=st.booleans(),
)
def test_targets_are_counted_as_the_loss_counts_them(lengths, ignored, boundary, whole_rows):
    rows, width = len(lengths), 9
    tokens = np.where(np.array(ignored[: rows * width]).reshape(rows, width), -100, 1)
    mask = np.arange(width) < np.array(lengths)[:, None]
    segments = np.broadcast_to(np.where(np.arange(width) < boundary, 1, 2), tokens.shape)
    batch = {"tokens": tokens, "mask": mask[:, 1] if whole_rows else mask, "segment_ids": segments}
    full = np.broadcast_to(mask[:, 1:2], mask.shape) if whole_rows else mask
    want = [
        int(
            ja.losses.next_token_cross_entropy(
                jnp.zeros((1, width, 3)),
                jnp.asarray(tokens[i : i + 1]),
                mask=jnp.asarray(full[i : i + 1]),
                segment_ids=jnp.asarray(segments[i : i + 1]),
            ).weight
        )
        for i in range(rows)
    ]
    assert ja.next_token_targets(batch).tolist() == want


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ja.pack_documents([("a", [1])], 4),
            ValueError,
            "document 'a' has tokens of shape",
        ),
        (lambda: ja.pack_documents([("a", [1.0, 2.0])], 4), TypeError, "'a' .* float64"),
        (lambda: ja.pack_documents([[1, 2, 3]], 4), TypeError, "document 0 must be a pair"),
        (lambda: ja.pack_documents([], 1), ValueError, "length must be at least 2"),
        (lambda: ja.pack_documents([], 4, open_rows=0), ValueError, "open_rows must be at least 1"),
    ],
    ids=["one token", "floating tokens", "no ID", "rows of one token", "no open row"],
)
def test_documents_that_cannot_be_packed_are_named(call, error, message):
    with pytest.raises(error, match=message):
        list(call())


def test_targets_of_a_batch_without_tokens_are_an_error():
    with pytest.raises(ValueError, match=r"tokens='tokens' is no leaf .* \['x'\]"):
        ja.next_token_targets({"x": np.ones((1, 2))})


def test_a_tuple_without_a_padding_leaf_is_refused_and_with_one_is_padded():
    stream = [(np.arange(3), np.array([5, 6, 7]))]
    plan = plan_of(1, 1)
    with pytest.raises(ValueError, match=r"padding names \['mask'\]"):
        list(ja.groups(stream, plan, batched=False, lengths=[4]))
    (group,) = ja.groups(stream, plan, batched=False, lengths=[4], padding={"1": -100})
    assert group.batch[1].tolist() == [[[5, 6, 7, -100]]]

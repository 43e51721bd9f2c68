"""Documents into examples: windows, stable IDs, padding, groups."""

import random

import numpy as np
import pytest

from jax_accum.crosscheck.corpus import default_documents
from jax_accum.crosscheck.data import (
    WINDOW,
    Document,
    Example,
    make_groups,
    ordered_examples,
    pad,
    windows,
)
from jax_accum.crosscheck.errors import InputError


def test_the_standard_library_gives_documents_of_very_different_length():
    lengths = [len(document.text.encode()) for document in default_documents()]
    assert len(lengths) > 50
    assert max(lengths) > 100 * min(lengths)


@pytest.mark.parametrize("length", [2, 3, 63, 64, 65, 127, 128, 1000])
def test_every_byte_but_the_first_is_a_target_exactly_once(length):
    text = "".join(random.Random(length).choices("aé\n<", k=length))
    data = text.encode()
    targets = b"".join(bytes(w.tokens[1:].tolist()) for w in windows(Document("d", text)))
    assert targets == data[1:]


def test_a_window_starts_with_the_byte_before_its_first_target():
    document = Document("d", "x" * 63 + "AB" + "y" * 63)
    first, second, *_ = windows(document)
    assert first.tokens[-1] == second.tokens[0] == ord("A")
    assert second.id == "d#63"


@pytest.mark.parametrize("text", ["", "a"])
def test_a_document_with_nothing_to_predict_is_named(text):
    with pytest.raises(InputError, match=r"'short\.txt:7' has .* two"):
        windows(Document("short.txt:7", text))


def test_ids_are_unique_and_do_not_depend_on_the_order_of_reading():
    documents = default_documents()
    examples = ordered_examples(documents, seed=3)
    ids = [example.id for example in examples]
    assert len(set(ids)) == len(ids) == sum(len(windows(d)) for d in documents)
    assert [e.id for e in ordered_examples(documents[::-1], seed=3)] == ids


def test_the_seed_changes_the_order_and_nothing_else():
    documents = default_documents()[:9]
    one, other = (ordered_examples(documents, seed) for seed in (0, 1))
    assert [e.id for e in one] != [e.id for e in other]
    assert {e.id: e.tokens.tolist() for e in one} == {e.id: e.tokens.tolist() for e in other}


@pytest.mark.parametrize("seed", range(5))
def test_microbatches_of_the_default_text_differ_in_supervised_tokens(seed):
    examples = ordered_examples(default_documents(), seed)
    for group in make_groups(examples, [8] * 6):
        tokens = [int(b["mask"][:, 1:].sum()) for b in group.microbatches(2)]
        assert len(set(tokens)) > 1
        assert sum(tokens) == group.tokens


def test_a_ragged_group_is_filled_up_with_rows_that_weigh_nothing():
    examples = [Example(str(i), np.arange(i + 2, dtype=np.int32)) for i in range(5)]
    (group,) = make_groups(examples, [5])
    *_, last = group.microbatches(2)
    assert last["tokens"].shape == last["mask"].shape == (2, WINDOW)
    assert last["mask"].sum(axis=1).tolist() == [6, 0]
    assert group.tokens == 1 + 2 + 3 + 4 + 5


def test_padding_keeps_tokens_and_masks_the_rest():
    batch = pad([Example("a", np.array([5, 6], np.int32))], rows=1, window=4)
    assert batch["tokens"].dtype == np.int32
    assert batch["mask"].tolist() == [[True, True, False, False]]


def test_a_stream_that_is_too_short_starts_over():
    examples = [Example(name, np.arange(2, dtype=np.int32)) for name in "abc"]
    groups = make_groups(examples, [2, 2])
    assert [group.ids for group in groups] == [("a", "b"), ("c", "a")]


def test_text_without_documents_is_an_error():
    with pytest.raises(InputError, match="no documents"):
        make_groups([], [1])

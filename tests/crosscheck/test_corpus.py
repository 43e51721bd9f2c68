"""Reading the user's own text: what becomes a document, and what is wrong with a file."""

import gzip
import json

import pytest

from jax_accum.crosscheck.corpus import choose, jsonl_documents, text_documents
from jax_accum.crosscheck.errors import InputError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_one_file_gives_a_document_a_paragraph(tmp_path):
    path = write(tmp_path / "a.txt", "one\ntwo\n\n \t\nthree\n\n\n")
    documents = text_documents([path])
    assert [d.text for d in documents] == ["one\ntwo", "three"]
    assert [d.id for d in documents] == [f"{path}:1", f"{path}:2"]


def test_several_files_give_a_document_each(tmp_path):
    paths = [write(tmp_path / name, f"{name}\n\nmore") for name in ("a.txt", "b.txt")]
    assert [(d.id, d.text) for d in text_documents(paths)] == [
        (str(path), f"{path.name}\n\nmore") for path in paths
    ]


def test_gzip_bom_and_line_ends_make_no_difference(tmp_path):
    plain = write(tmp_path / "a.txt", "né\n\nb b")
    other = write(tmp_path / "a.gz", gzip.compress("\ufeffné\r\n\r\nb b\r\n".encode()))
    assert [d.text for d in text_documents([plain])] == [d.text for d in text_documents([other])]


def test_json_lines_give_a_document_a_line_under_its_number(tmp_path):
    lines = [json.dumps({"body": "first\u2028 line", "x": 1}), "", json.dumps({"body": "second"})]
    path = write(tmp_path / "a.jsonl", "\n".join(lines) + "\n")
    documents = jsonl_documents(path, "body")
    assert [(d.id, d.text) for d in documents] == [
        (f"{path}:1", "first\u2028 line"),
        (f"{path}:3", "second"),
    ]


BAD_FILES = {
    "an empty file": (b"", "is empty"),
    "a file of blanks": (b" \n\n\t", "is empty"),
    "not UTF-8": (b"caf\xe9", "byte 3 is 0xe9"),
    "damaged gzip": (gzip.compress(b"hello hello")[:-9], "damaged"),
    "gzip of something not UTF-8": (gzip.compress(b"\xff\xfe"), "not UTF-8"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path, content, message):
    path = write(tmp_path / "bad file.txt", content)
    with pytest.raises(InputError, match=message) as caught:
        text_documents([path])
    assert str(path) in str(caught.value)


def test_missing_files_folders_and_repeats_are_named(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        text_documents([tmp_path / "none.txt"])
    with pytest.raises(InputError, match="is a folder"):
        text_documents([tmp_path])
    path = write(tmp_path / "a.txt", "text")
    with pytest.raises(InputError, match="twice"):
        text_documents([path, path])


BAD_LINES = {
    "not JSON": ("{", "a.jsonl:2 is not JSON"),
    "nested too deep": ("[" * 100_000, "a.jsonl:2 is not JSON"),
    "not an object": ("[1]", "holds a list"),
    "without the field": ('{"other": "x", "more": 1}', "no field 'text' .it has 'more', 'other'"),
    "a field that is not text": ('{"text": null}', "is null, not text"),
    "a field that is a number": ('{"text": 3}', "is a number, not text"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_line_that_cannot_be_used_is_named_with_the_reason(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line)
    with pytest.raises(InputError, match=message):
        jsonl_documents(path, "text")


def test_options_that_do_not_go_together_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}')
    for text, jsonl, field in (([path], path, "text"), ([], path, None), ([], None, "text")):
        with pytest.raises(InputError, match="go together"):
            choose(text, jsonl, field)
    documents, source = choose([], path, "text")
    assert documents[0].text == "fine"
    assert "text of" in source

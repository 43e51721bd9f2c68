"""Where documents come from: standard library, text files, JSON lines. Nothing is downloaded."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from jax_accum.crosscheck.data import Document
from jax_accum.crosscheck.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"


def default_documents() -> list[Document]:
    """The topics of Python's own interactive help, one document each (200 to 60,000 bytes).

    >>> len({document.id for document in default_documents()}) > 50
    True
    """
    from pydoc_data import topics

    return [Document(f"pydoc/{name}", text) for name, text in sorted(topics.topics.items())]


def choose(
    text: Sequence[Path], jsonl: Path | None, field: str | None
) -> tuple[list[Document], str]:
    """The documents that a command line asks for, and in words where they came from.

    Raises:
      InputError: options that do not go together, or a file that cannot be used.
    """
    if text and jsonl is not None:
        raise InputError("--text and --jsonl do not go together: give one of them")
    if (jsonl is None) != (field is None):
        raise InputError("--jsonl FILE and --field NAME go together: give both")
    if jsonl is not None and field is not None:
        return jsonl_documents(jsonl, field), f"field {field} of {jsonl}"
    if text:
        return text_documents(text), ", ".join(map(str, text))
    return default_documents(), "the help topics of Python's standard library"


def text_documents(paths: Sequence[Path]) -> list[Document]:
    """Documents of plain text files, gzip or not.

    One file gives a document per paragraph (paragraphs are parted by blank lines); several
    files give a document each. IDs are the path as given, with the paragraph's number.

    Raises:
      InputError: a file is missing, unreadable, empty, given twice, not UTF-8 or broken gzip.
    """
    for path in paths:
        if list(paths).count(path) > 1:
            raise InputError(f"--text names {str(path)!r} twice: give each file once")
    texts = [(path, read_text(path)) for path in paths]
    if len(texts) > 1:
        return [Document(path.as_posix(), text) for path, text in texts]
    path, text = texts[0]
    paragraphs = [part.strip() for part in re.split(r"\n[ \t]*\n", text) if part.strip()]
    return [Document(f"{path.as_posix()}:{i}", part) for i, part in enumerate(paragraphs, 1)]


def jsonl_documents(path: Path, field: str) -> list[Document]:
    """Documents of a JSON Lines file, gzip or not: the string ``field`` of each line.

    The ID is the path as given and the line's number; blank lines are passed over.

    Raises:
      InputError: the file cannot be read, or a line is not an object with that string field.
    """
    documents = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path.as_posix()}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not JSON: every line must be one object") from error
        if not isinstance(record, dict):
            raise InputError(
                f"{where} holds {_kind(record)}, not an object: every line must be one object"
            )
        if field not in record:
            names = ", ".join(sorted(map(repr, record))[:8]) or "none"
            raise InputError(f"{where} has no field {field!r} (it has {names}): check --field")
        if not isinstance(record[field], str):
            raise InputError(
                f"field {field!r} of {where} is {_kind(record[field])}, not text: check --field"
            )
        documents.append(Document(where, record[field]))
    return documents


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, gzip or not; line ends become newlines, a BOM is dropped.

    Raises:
      InputError: the file is missing, a folder, unreadable, empty, not UTF-8 or broken gzip.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{str(path)!r} does not exist: check the path") from None
    except IsADirectoryError:
        raise InputError(f"{str(path)!r} is a folder: give the files in it") from None
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # an embedded NUL byte
        raise InputError(f"{str(path)!r} is not a path: {error}") from error
    if data.startswith(GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{str(path)!r} begins like gzip but is damaged ({error}): compress it again"
            ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{str(path)!r} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}): "
            "convert it to UTF-8"
        ) from error
    if not text.strip():
        raise InputError(f"{str(path)!r} is empty: give a file with text in it")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return names.get(type(value), "null" if value is None else "a number")

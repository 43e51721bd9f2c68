"""pack_documents: several documents in a row, with the segment IDs that keep them apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jax_accum._checks import checked_int


class _Piece(NamedTuple):
    """A document, or a part of one that is longer than a row."""

    id: str
    tokens: np.ndarray


def pack_documents(
    documents: Iterable[Any], length: int, *, open_rows: int = 8
) -> Iterator[dict[str, Any]]:
    """Rows of `length` tokens that hold whole documents: a stream for `groups`.

    Hand it over with `batched=False, ids="id", padding={"segment_ids": 0}`.

    Each document goes into the first open row with room for it. When none has, the fullest
    is handed out and a new one opened, so that memory stays bounded and the order is that
    of the stream but for a few rows. A document longer than a row is cut into pieces that
    overlap by one token: each token but its first is a target exactly once. With
    `losses.next_token_cross_entropy(..., segment_ids=...)` no target crosses a boundary.

    Args:
      documents: pairs of an ID and tokens, `[n]`, integer.
      length: tokens in a row, at least 2.
      open_rows: rows that are filled side by side.

    Yields:
      `tokens`, `segment_ids` (from 1 on; 0 is padding) and `positions` (within the segment),
      `[length]`, int32; and `id`, a tuple of the pieces in the row: `"<ID>#<first token>"`.

    Raises:
      TypeError: an item is no pair, or tokens are not integers.
      ValueError: a document of fewer than two tokens, which has no target; `length` below 2.

    Example:
      >>> import jax_accum as ja
      >>> rows = list(ja.pack_documents([("a", [1, 2, 3]), ("b", [4, 5]), ("c", [6, 7])], 6))
      >>> [row["id"] for row in rows]
      [('a#0', 'b#0'), ('c#0',)]
      >>> rows[0]["tokens"].tolist(), rows[0]["segment_ids"].tolist()
      ([1, 2, 3, 4, 5, 0], [1, 1, 1, 2, 2, 0])
    """
    if checked_int(length, "length") < 2:
        raise ValueError("length must be at least 2: a row of one token holds no target.")
    checked_int(open_rows, "open_rows")
    return _packed(documents, length, open_rows)


def _packed(documents: Iterable[Any], length: int, open_rows: int) -> Iterator[dict[str, Any]]:
    rows: list[list[_Piece]] = []
    for piece in _pieces(documents, length):
        for row in rows:
            if _filled(row) + len(piece.tokens) <= length:
                row.append(piece)
                break
        else:
            if len(rows) == open_rows:
                fullest = max(range(open_rows), key=[_filled(row) for row in rows].__getitem__)
                yield _as_row(rows.pop(fullest), length)
            rows.append([piece])
    for row in rows:
        yield _as_row(row, length)


def _pieces(documents: Iterable[Any], length: int) -> Iterator[_Piece]:
    for number, document in enumerate(documents):
        if not isinstance(document, tuple) or len(document) != 2:
            raise TypeError(f"document {number} must be a pair of an ID and tokens.")
        name, tokens = document[0], np.asarray(document[1])
        if tokens.ndim != 1 or len(tokens) < 2:
            raise ValueError(
                f"document {name!r} has tokens of shape {tokens.shape}: predicting the next token "
                "needs one axis with two of them. Leave it out, or join it to its neighbour."
            )
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"document {name!r} has tokens of dtype {tokens.dtype}: want integers.")
        for start in range(0, len(tokens) - 1, length - 1):
            yield _Piece(f"{name}#{start}", tokens[start : start + length])


def _filled(row: list[_Piece]) -> int:
    return sum(len(piece.tokens) for piece in row)


def _as_row(pieces: list[_Piece], length: int) -> dict[str, Any]:
    out = {name: np.zeros(length, np.int32) for name in ("tokens", "segment_ids", "positions")}
    start = 0
    for number, piece in enumerate(pieces, 1):
        stop = start + len(piece.tokens)
        out["tokens"][start:stop] = piece.tokens
        out["segment_ids"][start:stop] = number
        out["positions"][start:stop] = np.arange(len(piece.tokens))
        start = stop
    return {**out, "id": tuple(piece.id for piece in pieces)}

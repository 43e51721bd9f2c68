"""Real text as examples: documents, byte tokens, windows with stable IDs, padded groups.

Shape legend: B rows, T positions of a window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jax_accum.crosscheck.errors import InputError

WINDOW = 64
VOCABULARY = 256


@dataclass(frozen=True)
class Document:
    """A text with a stable ID: where it came from, never its place in an order."""

    id: str
    text: str


@dataclass(frozen=True)
class Example:
    """One window of a document: up to T byte tokens ``[length]`` int32 and a stable ID."""

    id: str
    tokens: NDArray[np.int32]

    @property
    def targets(self) -> int:
        """Tokens a next-token loss supervises here: all but the first of the window."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Group:
    """The examples of one optimizer update, not yet cut into microbatches."""

    examples: tuple[Example, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """Stable IDs in the order of the rows."""
        return tuple(example.id for example in self.examples)

    @property
    def tokens(self) -> int:
        """Supervised tokens of the whole group: the denominator of its loss."""
        return sum(example.targets for example in self.examples)

    def microbatches(self, size: int) -> Iterator[dict[str, NDArray[np.generic]]]:
        """Cuts the group into padded batches of ``size`` rows; the last may hold fewer examples.

        Yields:
          what `pad` returns, ``ceil(examples / size)`` times.
        """
        for start in range(0, len(self.examples), size):
            yield pad(self.examples[start : start + size], size)


def pad(examples: Sequence[Example], rows: int, window: int = WINDOW) -> dict[str, NDArray]:
    """A batch of ``rows`` rows: tokens and the mask of tokens that are supervised as targets.

    Padding is token 0 with a false mask, at the end of a row; missing examples are rows whose
    mask is false throughout, so they weigh nothing.

    Returns:
      ``tokens`` int32 ``[rows, window]`` and ``mask`` bool ``[rows, window]``.

    >>> batch = pad([Example("a", np.array([7, 8, 9], np.int32))], rows=2, window=4)
    >>> batch["tokens"].tolist(), batch["mask"].tolist()[1]
    ([[7, 8, 9, 0], [0, 0, 0, 0]], [False, False, False, False])
    """
    tokens_BxT = np.zeros((rows, window), np.int32)
    mask_BxT = np.zeros((rows, window), bool)
    for row, example in enumerate(examples):
        tokens_BxT[row, : len(example.tokens)] = example.tokens
        mask_BxT[row, : len(example.tokens)] = True
    return {"tokens": tokens_BxT, "mask": mask_BxT}


def windows(document: Document, length: int = WINDOW) -> list[Example]:
    """Cuts a document into windows of at most ``length`` bytes, overlapping by one.

    The overlap makes every byte but the document's first a target exactly once. The ID is the
    document's, ``#`` and the byte at which the window starts.

    Raises:
      InputError: the document has fewer than two tokens, so there is nothing to predict.

    >>> [(w.id, w.tokens.tolist()) for w in windows(Document("d", "abcd"), 3)]
    [('d#0', [97, 98, 99]), ('d#2', [99, 100])]
    """
    data = np.frombuffer(document.text.encode("utf-8"), np.uint8).astype(np.int32)
    if len(data) < 2:
        count = "1 token" if len(data) else "no tokens"
        raise InputError(
            f"document {document.id!r} has {count}, and predicting the next token needs two: "
            "remove it or join it to its neighbour"
        )
    starts = range(0, len(data) - 1, length - 1)
    return [Example(f"{document.id}#{start}", data[start : start + length]) for start in starts]


def ordered_examples(documents: Sequence[Document], seed: int) -> list[Example]:
    """All windows of all documents, in an order drawn from ``seed``.

    Two windows of every document come first, one of them its last, which is padded: examples of
    very different length stand side by side, so that microbatches differ in supervised tokens.
    Where documents are long, the other windows follow. The order depends on the IDs and the
    seed, not on the order of the documents.
    """
    ranked: list[tuple[int, str, Example]] = []
    for document in documents:
        *body, tail = windows(document)
        body.sort(key=lambda example: _draw(f"{seed}/window", example.id))
        for rank, example in enumerate([tail, *body]):
            # A draw of its own: windows ranked early have small draws of the first kind.
            ranked.append((rank // 2, _draw(f"{seed}/order", example.id), example))
    return [example for *_, example in sorted(ranked, key=lambda item: item[:2])]


def make_groups(examples: Sequence[Example], sizes: Sequence[int]) -> list[Group]:
    """Consecutive groups of these sizes. A stream that is too short starts over.

    Raises:
      InputError: there are no examples.

    >>> [len(group.examples) for group in make_groups([Example("a", np.zeros(2))], [8, 5])]
    [8, 5]
    """
    if not examples:
        raise InputError("the text holds no documents: give a file with text in it")
    groups, first = [], 0
    for size in sizes:
        chosen = (examples[(first + i) % len(examples)] for i in range(size))
        groups.append(Group(tuple(chosen)))
        first += size
    return groups


def _draw(kind: str, name: str) -> str:
    """A pseudo-random key that is the same in every process and for every order of reading."""
    return hashlib.sha256(f"{kind}/{name}".encode()).hexdigest()

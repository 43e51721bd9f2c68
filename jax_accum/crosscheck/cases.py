"""The matrix of cases, by name: how a group is cut, by which way, optimizer and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from jax_accum.crosscheck.errors import InputError

EXAMPLES_PER_UPDATE = 8
UPDATES = 6
# The undivided runs keep their parameters after each update: 13 MB an update.
MAX_UPDATES = 50
ACCUMULATIONS = (1, 4, 8)
WAYS = ("across", "inone")
OPTIMIZERS = ("sgd", "adamw")
DTYPES = ("float32", "float64")
MAX_ACCUMULATION = 256

WAY_MEANING = {
    "across": "across calls: ja.MultiSteps, one call per microbatch",
    "inone": "in one call: ja.make_train_step, one call per update",
}
OPTIMIZER_MEANING = {
    "sgd": "plain SGD",
    "adamw": "AdamW with decoupled weight decay, clipping by global norm, a warm-up schedule",
}


Either = TypeVar("Either", bound="Named")


class Named(Protocol):
    """Whatever has a name."""

    @property
    def name(self) -> str:
        """What ``--case`` takes."""


@dataclass(frozen=True)
class Case:
    """One comparison: a recipe, and how its groups are cut on the accumulating side.

    Args:
      way: of `WAYS`, how JAX accumulates.
      microbatches: A, into which a full group is cut.
      optimizer: of `OPTIMIZERS`.
      dtype: of `DTYPES`, of parameters, activations and accumulators.
      ragged: the stream ends inside the last group: it has fewer microbatches, and where the
        examples do not divide, a short last microbatch.

    >>> Case("across", 4, "adamw", "float32", ragged=True).name
    'adamw-float32-a4-ragged-across'
    """

    way: str
    microbatches: int
    optimizer: str
    dtype: str
    ragged: bool = False

    @property
    def name(self) -> str:
        """What ``--case`` takes and the report shows."""
        cut = f"a{self.microbatches}" + ("-ragged" if self.ragged else "")
        return f"{self.optimizer}-{self.dtype}-{cut}-{self.way}"

    @property
    def microbatch_size(self) -> int:
        """Examples per microbatch, m: the same examples for every A that divides them."""
        return -(-EXAMPLES_PER_UPDATE // self.microbatches)

    @property
    def examples_per_update(self) -> int:
        """``m × A``: the examples of one full group."""
        return self.microbatch_size * self.microbatches

    @property
    def last_examples(self) -> int:
        """Examples of the last group: with ``ragged``, five eighths of a full one, rounded."""
        return (
            max(1, round(self.examples_per_update * 5 / 8))
            if self.ragged
            else (self.examples_per_update)
        )

    @property
    def last_microbatches(self) -> int:
        """Microbatches of the last group; the last of them may be short."""
        return -(-self.last_examples // self.microbatch_size)

    @property
    def meaning(self) -> str:
        """The case in one sentence."""
        cut = f"groups of {self.examples_per_update} examples in {self.microbatches} microbatches"
        if self.microbatches == 1:
            cut = f"groups of {self.examples_per_update} examples, not cut"
        end = ", the last group ragged" if self.ragged else ""
        how = f"{OPTIMIZER_MEANING[self.optimizer]}; {WAY_MEANING[self.way]}"
        return f"{self.dtype}; {cut}{end}; {how}"


def make_matrix(accumulations: Sequence[int] = ACCUMULATIONS) -> list[Case]:
    """Every product of ways, A, optimizers and dtypes, and a ragged last group for half of them.

    The ragged cases alternate dtypes, so that each A, way and optimizer has one; so do the cases
    with A = 1, which are there to show that nothing changes where nothing is cut.

    Raises:
      InputError: an A is below 1 or beyond `MAX_ACCUMULATION`.

    >>> len(make_matrix()), len(make_matrix([4]))
    (28, 12)
    """
    for count in accumulations:
        if not 1 <= count <= MAX_ACCUMULATION:
            raise InputError(
                f"--microbatches must be from 1 to {MAX_ACCUMULATION}, got {count}: it is how "
                "many microbatches a group is cut into"
            )
    cases = []
    for count in dict.fromkeys(accumulations):
        for i, optimizer in enumerate(OPTIMIZERS):
            for j, way in enumerate(WAYS):
                one = DTYPES[(i + j) % 2]
                dtypes = DTYPES if count > 1 else (one,)
                cases += [Case(way, count, optimizer, dtype) for dtype in dtypes]
                if count > 1:
                    cases.append(Case(way, count, optimizer, one, ragged=True))
    return cases


def select(matrix: Sequence[Either], names: Sequence[str]) -> list[Either]:
    """The cases of ``matrix`` with these names, in its order; all of them if there are none.

    Raises:
      InputError: a name is not in the matrix.
    """
    known = {case.name: case for case in matrix}
    for name in names:
        if name not in known:
            raise InputError(f"unknown case {name!r}: {hint(name, list(known))}")
    return [case for case in matrix if not names or case.name in names]


def hint(name: str, known: list[str]) -> str:
    """What to do about an unknown name: the nearest ones, and how to see all.

    >>> hint("sdg", ["sgd", "adamw"])
    'did you mean sgd? --list shows all'
    """
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return (f"did you mean {' or '.join(near)}? " if near else "") + "--list shows all"

"""The full matrix: every pair of choices in some case, chosen greedily and the same each time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

from jax_accum.crosscheck.cases import Case

EXAMPLES_PER_UPDATE = 48
ATTEMPTS = 4
# Of the groups, from 0: which one overflows (float16), which one has nothing supervised.
OVERFLOWS, EMPTY = 1, 2
LAST_EXAMPLES = 27
REPLICAS = 2
DEVICE_WAYS = ("jit", "shardmap", "pmap")

AXES: dict[str, dict[str, str]] = {
    "way": {
        "across": "across calls: ja.MultiSteps",
        "inone": "in one call: ja.make_train_step",
        "jit": "jit over a mesh of two devices: ja.make_train_step(mesh=...)",
        "shardmap": "shard_map over two devices: ja.MultiSteps(axis_name=...), across calls",
        "pmap": "pmap over two devices: ja.accumulated_value_and_grad(axis_name=...)",
    },
    "torch": {
        "loop": "PyTorch in one process",
        "ddp": "PyTorch in two processes (DistributedDataParallel)",
    },
    "cut": {
        "a1": "groups not cut",
        "a3": "groups in 3 microbatches on each replica",
        "a8": "groups in 8 microbatches on each replica",
    },
    "optimizer": {
        "sgd": "SGD with momentum",
        "adamw": "AdamW with clipping and a warm-up schedule",
        "adafactor": "Adafactor, each framework's own",
    },
    "dtype": {
        "float32": "float32",
        "float64": "float64",
        "bfloat16": "computed in bfloat16, parameters and accumulators float32",
        "float16": "computed in float16 under a loss scale, one group forced to overflow",
    },
    "group": {
        "full": "all groups full",
        "ragged": "the last group ragged",
        "ignored": "one microbatch of each group with all labels ignored",
        "skipped": "one group with nothing supervised",
    },
    "terms": {
        "one": "one loss term",
        "three": "three loss terms with denominators of their own",
    },
}


@dataclass(frozen=True)
class FullCase:
    """One comparison of the full matrix: a value of each of `AXES`.

    >>> FullCase("jit", "ddp", "a3", "adamw", "float32", "ragged", "three").name
    'jit-ddp-a3-adamw-float32-ragged-three'
    """

    way: str
    torch: str
    cut: str
    optimizer: str
    dtype: str
    group: str
    terms: str

    @property
    def values(self) -> tuple[str, ...]:
        """The value of each axis, in the order of `AXES`."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def name(self) -> str:
        """What ``--case`` takes and the report shows."""
        return "-".join(self.values)

    @property
    def meaning(self) -> str:
        """The case in one sentence."""
        words = (AXES[field.name][getattr(self, field.name)] for field in fields(self))
        return "; ".join(words)

    @property
    def microbatches(self) -> int:
        """A, microbatches of a full group on each replica."""
        return int(self.cut[1:])

    @property
    def jax_replicas(self) -> int:
        """D on the JAX side."""
        return REPLICAS if self.way in DEVICE_WAYS else 1

    @property
    def torch_replicas(self) -> int:
        """D on the PyTorch side; it need not be JAX's, the examples are the same."""
        return REPLICAS if self.torch == "ddp" else 1

    @property
    def possible(self) -> bool:
        """A group that is one microbatch of one replica cannot hold an ignored one beside it."""
        alone = self.cut == "a1" and max(self.jax_replicas, self.torch_replicas) == 1
        return not (alone and self.group == "ignored")

    @property
    def last_examples(self) -> int:
        """Examples of the last group."""
        return LAST_EXAMPLES if self.group == "ragged" else EXAMPLES_PER_UPDATE

    @property
    def last_microbatches(self) -> int:
        """Microbatches of the last group in one process, as planted loops cut it."""
        return -(-self.last_examples * self.microbatches // EXAMPLES_PER_UPDATE)

    @property
    def plain(self) -> bool:
        """Whether a planted loop can run it: one term, no skips, no loss scale."""
        wide = self.dtype in ("float32", "float64")
        return wide and self.terms == "one" and self.group in ("full", "ragged")

    def skipped(self, index: int) -> str | None:
        """Why the group of this index, from 0, makes no update: "nonfinite", "empty", or None."""
        if index == OVERFLOWS and self.dtype == "float16":
            return "nonfinite"
        return "empty" if index == EMPTY and self.group == "skipped" else None


AnyCase = Case | FullCase

# Cases in which planted faults can show; a covering choice need not hold them by itself.
SEEDS = (
    FullCase("across", "loop", "a3", "adamw", "float32", "ragged", "one"),
    FullCase("inone", "loop", "a8", "adamw", "float16", "full", "one"),
    FullCase("jit", "ddp", "a3", "sgd", "float64", "ragged", "three"),
)


@cache
def full_matrix() -> tuple[FullCase, ...]:
    """Cases in which every pair of values of two different axes occurs.

    Greedy: after `SEEDS`, again and again the case with the most pairs that no earlier one has;
    the first such case in the order of `AXES`, so that the choice is the same everywhere.
    """
    every = [
        case for values in itertools.product(*AXES.values()) if (case := FullCase(*values)).possible
    ]
    bits: dict[tuple[int, str, int, str], int] = {}
    masks = {}
    for case in every:
        masks[case] = sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs(case))
    chosen = list(SEEDS)
    missing = (1 << len(bits)) - 1
    for case in chosen:
        missing &= ~masks[case]
    while missing:
        best = max(every, key=lambda case: (masks[case] & missing).bit_count())
        chosen.append(best)
        missing &= ~masks[best]
    return tuple(chosen)


def pairs(case: FullCase) -> list[tuple[int, str, int, str]]:
    """All pairs of values of two axes in a case, with the positions of the axes."""
    numbered = enumerate(case.values)
    return [(i, a, j, b) for (i, a), (j, b) in itertools.combinations(numbered, 2)]


def needs_devices(cases: Sequence[object]) -> bool:
    """Whether a case runs JAX on several devices."""
    return any(isinstance(case, FullCase) and case.jax_replicas > 1 for case in cases)

"""Candidate: one way in which a step may work, and the gradient it makes of a group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_accum.doctor._recipe import clipped
from jax_accum.doctor._sums import Part

RIGHT = "right"
Microbatch = list[Part]
"""The parts of all replicas."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to work: what differs from the right one, knob by knob.

    Attributes:
      name: of the fault, or `RIGHT`. Several candidates may be ways of one fault.
      way: in words, how this one goes about it.
      loss: how the loss reads its labels; see `Oracle.part`.
      replicas: "all", or "first": every replica was given the first one's rows.
      divide: by what: "group" (right), "microbatch", "part", "replica", or "nothing"; or
        by the weight that one term has in the group, "term: name", or in each microbatch, "each
        term: name".
      power_a: the result is multiplied by the group's number of microbatches to this power.
      power_full: by that of a full group.
      power_d: by the replicas.
      take: which microbatches: "all", "first", "last", "all but the first".
      weights_of: denominators are of what is "taken", or of "all".
      leak: what of earlier groups is in it: "", "gradients", "sums", "sums and weights".
      leak_from: only the previous group's, from this microbatch on; -1 for all earlier groups'.
      clip: "end", "each" microbatch, or "before" the division.
      when: the optimizer runs "once", for "each" microbatch alone, or "cumulative": for each
        microbatch with the sum so far.
      rate: the schedule is read at "updates", or at the microbatches "before" the group, "within"
        it (its last) or "after" it.
      bias: Adam's correction counts "updates" or "microbatches".
      decays: weight decay "once"; or in "each" microbatch, all at the end; or "after each", "before
        each" gradient.
      averages: the EMA advances "once" or in "each" microbatch.
      partial: a group that is not full is "kept", "dropped", or "carried" into the next.
      ignored: a microbatch without weight adds "nothing" or "nan".
      empty: a group without weight is a "skip", or an update with gradient "zero", "counted" only,
        or "nan".
      nonfinite: the same for a group with an inf; "poison" or "accumulator" for what stays
        NaN, "stuck" if all later groups are skipped.
      accumulator: dtype of the sum if too narrow: "bfloat16" or "float16".
      rounds: what is summed in that dtype: "shares", "sums" or "means", and whether each is
        rounded "first".
      scales: by group, factors of its microbatches: a loss scale that moved.
    """

    name: str = RIGHT
    way: str = ""
    loss: str = "as given"
    replicas: str = "all"
    divide: str = "group"
    power_a: int = 0
    power_full: int = 0
    power_d: int = 0
    take: str = "all"
    weights_of: str = "taken"
    leak: str = ""
    leak_from: int = -1
    clip: str = "end"
    when: str = "once"
    rate: str = "updates"
    bias: str = "updates"
    decays: str = "once"
    averages: str = "once"
    partial: str = "kept"
    ignored: str = "nothing"
    empty: str = "skip"
    nonfinite: str = "skip"
    accumulator: str = ""
    rounds: str = ""
    scales: tuple[tuple[float, ...], ...] = ()

    def knobs(self) -> dict[str, Any]:
        """What differs from the right way."""
        fields = {f.name: f.default for f in dataclasses.fields(self)}
        return {
            name: getattr(self, name)
            for name, default in fields.items()
            if name not in ("name", "way") and getattr(self, name) != default
        }

    def joined(self, other: Candidate) -> Candidate | None:
        """Both faults at once, or None if they turn the same knob."""
        mine, theirs = self.knobs(), other.knobs()
        if mine.keys() & theirs.keys():
            return None
        return dataclasses.replace(self, name=f"{self.name} + {other.name}", **theirs)


def ways(name: str, *ways: tuple[str, dict[str, Any]]) -> list[Candidate]:
    """Candidates of one fault: each a way in words, and its knobs."""
    return [Candidate(name=name, way=way, **knobs) for way, knobs in ways]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a combination needs to know of the case.

    Attributes:
      full: microbatches of a full group.
      replicas: D.
      coefficients: of the terms.
      clip_norm: the recipe's.
    """

    full: int
    replicas: int
    coefficients: Mapping[str, float]
    clip_norm: float | None


def gradient_of(
    candidate: Candidate,
    group: Sequence[Microbatch],
    settings: Settings,
    *,
    earlier: Sequence[Sequence[Microbatch]] = (),
    place: int = 0,
    size: int | None = None,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The gradient that a candidate hands to the optimizer, and what it is the sum of.

    Args:
      candidate: the way to work.
      group: the microbatches.
      settings: of the case.
      earlier: the groups before, for what leaks.
      place: number of the group in its run.
      size: microbatches of the group, where `group` is only some of them.

    Returns:
      the gradient, flat; and the shares of the microbatches that were added up to it.
    """
    if candidate.replicas == "first":
        group = [[microbatch[0]] * len(microbatch) for microbatch in group]
    size = len(group) if size is None else size
    taken = list(group)
    if candidate.take == "first":
        taken = taken[:1]
    elif candidate.take == "last":
        taken = taken[-1:]
    elif candidate.take == "all but the first" and place > 0:
        taken = taken[1:]
    counted = taken if candidate.weights_of == "taken" else list(group)
    if candidate.leak == "sums and weights":
        before = [microbatch for part in earlier for microbatch in part]
        taken, counted = before + taken, before + counted

    shares = shares_of(candidate, taken, counted, settings)
    if candidate.leak == "gradients":
        for past in _leaking(candidate, earlier):
            whole, kept = past
            shares += shares_of(candidate, kept, whole, settings)
    elif candidate.leak == "sums":
        for _, kept in _leaking(candidate, earlier):
            shares += shares_of(candidate, kept, counted, settings)
    if place < len(candidate.scales):
        factors = candidate.scales[place]
        shares = [s * f for s, f in zip(shares, factors, strict=False)]
    total = _summed(candidate, shares, counted)
    factor = (
        float(size) ** candidate.power_a
        * float(settings.full) ** candidate.power_full
        * float(settings.replicas) ** candidate.power_d
    )
    if candidate.clip == "before" and settings.clip_norm is not None:
        undone = float(size) if candidate.divide != "group" else _weight(counted)
        total = clipped(total * undone, settings.clip_norm) / undone
    return (total if factor == 1.0 else total * factor), shares


def _leaking(
    candidate: Candidate, earlier: Sequence[Sequence[Microbatch]]
) -> list[tuple[list[Microbatch], list[Microbatch]]]:
    """Of each group that leaks: all of it, and the microbatches that do."""
    if candidate.leak_from < 0:
        return [(list(group), list(group)) for group in earlier]
    return [(list(group), list(group[candidate.leak_from :])) for group in earlier[-1:]]


def shares_of(
    candidate: Candidate,
    taken: Sequence[Microbatch],
    counted: Sequence[Microbatch],
    settings: Settings,
) -> list[np.ndarray]:
    """What each microbatch adds, divided as the candidate divides; by the weights of `counted`."""
    if candidate.clip == "each" and settings.clip_norm is not None:
        whole = dataclasses.replace(candidate, clip="end", divide="group", accumulator="")
        weight = _weight(counted)
        own = [sum(shares_of(whole, [mb], [mb], settings), start=np.zeros(())) for mb in taken]
        parts = [
            _weight([mb]) / weight if candidate.divide == "group" else 1 / len(taken)
            for mb in taken
        ]
        return [clipped(g, settings.clip_norm) * f for g, f in zip(own, parts, strict=True)]
    shares = []
    for microbatch in taken:
        share: Any = None
        for d, part in enumerate(microbatch):
            for term, (_, weight, gradient, _) in part.items():
                divisor = weight and _divisor(candidate.divide, term, d, microbatch, counted)
                if divisor:
                    added = gradient * (settings.coefficients.get(term, 1.0) / divisor)
                else:  # 0 / 0, or nothing; a weight that is divided by another term's 0
                    nothing = weight == 0 and candidate.ignored != "nan"
                    added = np.full_like(gradient, 0.0 if nothing else np.nan)
                share = added if share is None else np.add(share, added, out=share)
        shares.append(share)
    return shares


def _divisor(
    divide: str,
    term: str,
    replica: int,
    microbatch: Microbatch,
    counted: Sequence[Microbatch],
) -> float:
    kind, _, only = divide.partition(": ")
    if only:
        divide, term = {"term": "group", "each term": "microbatch"}[kind], only
    if divide == "group":
        return sum(part[term].weight for mb in counted for part in mb)
    if divide == "microbatch":
        return len(counted) * sum(part[term].weight for part in microbatch)
    if divide == "part":
        return len(counted) * len(microbatch) * microbatch[replica][term].weight
    if divide == "replica":
        return len(microbatch) * sum(mb[replica][term].weight for mb in counted)
    assert divide == "nothing", divide
    return 1.0


def _weight(microbatches: Sequence[Microbatch]) -> float:
    """The weight of the first term."""
    return sum(next(iter(part.values())).weight for mb in microbatches for part in mb)


def _summed(
    candidate: Candidate, shares: list[np.ndarray], counted: Sequence[Microbatch]
) -> np.ndarray:
    if not candidate.accumulator:
        total = np.array(shares[0])
        for share in shares[1:]:
            total += share
        return total
    dtype = jnp.dtype(candidate.accumulator)
    form, _, first = candidate.rounds.partition(", ")
    scale = {"sums": _weight(counted), "means": float(len(counted)), "shares": 1.0}[form]
    total = np.zeros(shares[0].shape, dtype)
    for share in shares:
        added = (share * scale).astype(np.float32)
        if first == "first":
            added = added.astype(dtype).astype(np.float32)
        total = (total.astype(np.float32) + added).astype(dtype)
    if first == "first" and scale != 1.0:
        return (total / dtype.type(scale)).astype(np.float64)
    return total.astype(np.float64) / scale

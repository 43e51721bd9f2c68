"""audit_ids: which examples each replica really processed, and which twice or not at all."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

Place = tuple[int, int]
"""A group and a replica."""


class AuditError(ValueError):
    """An audit in strict mode found something; `.audit` holds it."""

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit.describe())
        self.audit = audit


@dataclasses.dataclass(frozen=True)
class Audit:
    """What was processed how often. Keys are IDs, values where they were: (group, replica).

    Attributes:
      groups: how many were audited.
      examples: how many examples they processed, repetitions included.
      within_replica: more than once by one replica in one group.
      across_replicas: by several replicas in one group.
      across_groups: in several groups of the epoch.
      missing: expected, and never processed.
      unexpected: processed, and not expected.
    """

    groups: int
    examples: int
    within_replica: dict[Hashable, list[Place]]
    across_replicas: dict[Hashable, list[Place]]
    across_groups: dict[Hashable, list[Place]]
    missing: tuple[Hashable, ...]
    unexpected: tuple[Hashable, ...]

    @property
    def ok(self) -> bool:
        """Whether every example was processed once, and all that were expected."""
        return not (
            self.within_replica
            or self.across_replicas
            or self.across_groups
            or self.missing
            or self.unexpected
        )

    def describe(self, most: int = 10) -> str:
        """The findings by ID, `most` of each kind."""
        if self.ok:
            return f"{self.examples} examples in {self.groups} groups, each processed once."
        lines = [f"{self.examples} examples in {self.groups} groups, but not each once:"]
        for kind, found in (
            ("more than once by one replica in one group", self.within_replica),
            ("by several replicas in one group", self.across_replicas),
            ("in several groups", self.across_groups),
        ):
            for name, places in _first(found, most, lines, kind):
                where = ", ".join(f"group {g} replica {d}" for g, d in places)
                lines.append(f"  {name!r}: {where}")
        for kind, names in (("never", self.missing), ("unexpectedly", self.unexpected)):
            for name, _ in _first({name: [] for name in names}, most, lines, kind):
                lines.append(f"  {name!r}")
        return "\n".join(lines)


def audit_ids(
    *ids: Iterable[Any], expected: Iterable[Hashable] | None = None, strict: bool = False
) -> Audit:
    """Audits what one epoch processed.

    Args:
      *ids: per process an iterable over groups, each the `replica_ids` of a `Group`: a
        mapping from a replica's number to the IDs it processed. A sequence over replicas
        does as well, and so does a `Group`. `None` stands for padding and is passed over.
      expected: all IDs of the epoch; without it nothing can be missing.
      strict: raise if there is anything to report.

    Returns:
      An `Audit`.

    Raises:
      AuditError: with `strict`.
      ValueError: processes that made different numbers of groups, or that processed for the
        same replica.

    Example:
      >>> import jax_accum as ja
      >>> audit = ja.audit_ids([{0: ["a", "b"], 1: ["b", "c"]}, {0: ["d"]}], expected="abcde")
      >>> audit.across_replicas, audit.missing
      ({'b': [(0, 0), (0, 1)]}, ('e',))
    """
    if not ids:
        raise ValueError("ids is missing: pass the groups of at least one process.")
    processes = [[_by_replica(group) for group in groups] for groups in ids]
    if len({len(groups) for groups in processes}) > 1:
        made = ", ".join(str(len(groups)) for groups in processes)
        raise ValueError(
            f"the processes made different numbers of groups: {made}. Audit the same of all."
        )
    places: dict[Hashable, list[Place]] = {}
    for g, parts in enumerate(zip(*processes, strict=True)):
        replicas: set[int] = set()
        for part in parts:
            if twice := replicas & part.keys():
                raise ValueError(
                    f"group {g}: two processes report for the replicas {sorted(twice)}. Every "
                    "replica belongs to one process: check process_index."
                )
            replicas |= part.keys()
            for d, names in part.items():
                for name in names:
                    if name is not None:
                        places.setdefault(name, []).append((g, d))
    known = None if expected is None else list(expected)
    audit = Audit(
        groups=len(processes[0]),
        examples=sum(map(len, places.values())),
        within_replica=_where(places, lambda at: max(Counter(at).values()) > 1),
        across_replicas=_where(places, lambda at: max(Counter(g for g, _ in set(at)).values()) > 1),
        across_groups=_where(places, lambda at: len({g for g, _ in at}) > 1),
        missing=() if known is None else tuple(n for n in known if n not in places),
        unexpected=() if known is None else tuple(places.keys() - set(known)),
    )
    if strict and not audit.ok:
        raise AuditError(audit)
    return audit


def _by_replica(group: Any) -> dict[int, list[Any]]:
    group = getattr(group, "replica_ids", group)
    if isinstance(group, Mapping):
        return {int(d): list(names) for d, names in group.items()}
    return {d: list(names) for d, names in enumerate(group)}


def _where(places: dict[Hashable, list[Place]], test: Any) -> dict[Hashable, list[Place]]:
    return {name: at for name, at in places.items() if test(at)}


def _first(found: dict[Any, Any], most: int, lines: list[str], kind: str) -> list[tuple[Any, Any]]:
    """The first findings of a kind, its heading appended to `lines`."""
    if found:
        more = f", the first {most}" if len(found) > most else ""
        lines.append(f"{len(found)} processed {kind}{more}:")
    return list(found.items())[:most]

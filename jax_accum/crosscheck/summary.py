"""The verdict in words and as plain data: what the terminal, the JSON file and the page all say."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jax_accum.crosscheck.compare import UNDIVIDED, Finding
from jax_accum.crosscheck.data import WINDOW
from jax_accum.crosscheck.run import CaseResult, Crosscheck
from jax_accum.crosscheck.tolerances import TOLERANCES

SCHEMA = 1
PACKAGES = ("jax-accum", "jax", "jaxlib", "optax", "flax", "torch", "numpy")


@dataclass(frozen=True)
class Told:
    """What a run is reported with.

    Args:
      run: the run.
      planned: cases that were to be compared.
      command: the command line that repeats it.
      source: where the text came from, in words.
      interrupted: whether it was cut short.
    """

    run: Crosscheck
    planned: int
    command: str
    source: str
    interrupted: bool = False

    @property
    def results(self) -> Sequence[CaseResult]:
        """The cases that were compared."""
        return self.run.results

    @property
    def verdict(self) -> str:
        """``equal``, ``differ``, or ``nothing compared``."""
        if not self.results:
            return "nothing compared"
        return "equal" if all(result.equal for result in self.results) else "differ"

    @property
    def sentence(self) -> str:
        """The verdict in one or two sentences."""
        done, words = len(self.results), f"{len(self.results)} of {self.planned} cases"
        if done == self.planned:
            words = f"all {done} cases" if done > 1 else "the one case"
        if not done:
            return "Nothing was compared: the run was cut short before the first case ended."
        if self.verdict == "equal":
            top = max(result.worst.ratio for result in self.results)
            text = (
                f"JAX and PyTorch trained the same in {words}: the largest difference is "
                f"{times(top)} what rounding allows."
            )
        else:
            bad = [result for result in self.results if not result.equal]
            failure = bad[0].failure
            assert failure is not None
            text = (
                f"JAX and PyTorch differ in {len(bad)} of {done} cases. The first quantity that "
                f"left its tolerance, in {bad[0].case.name}: {in_words(failure)}."
            )
            if failure.side == UNDIVIDED:
                text += (
                    " The two models differ before any accumulation: accumulation is not judged."
                )
        if self.run.fault is not None:
            text += f" A fault was planted: {self.run.fault.meaning}."
        if self.interrupted:
            text += f" The run was cut short after {done} of {self.planned} cases."
        return text

    @property
    def notes(self) -> list[str]:
        """What a reader should know about the text before trusting the verdict."""
        notes = []
        need = max((self.run.examples_of(r.case) for r in self.results), default=0)
        have = len(self.run.examples)
        if need > have:
            notes.append(
                f"The text gives {have} examples and the runs use {need}: examples repeat."
            )
        if self.results and all(len(set(r.tokens)) == 1 for r in self.results):
            notes.append(
                "All groups have the same number of tokens: with texts of more varied length "
                "the check would see more."
            )
        notes += sorted(
            {f"PyTorch in two processes: {r.trouble}" for r in self.results if r.trouble}
        )
        return notes


def times(ratio: float) -> str:
    """A multiple in words.

    >>> times(0.42), times(31250.0), times(6.6e12), times(float("inf"))
    ('0.42 times', '31,250 times', '7e+12 times', 'beyond all')
    """
    if ratio == float("inf"):
        return "beyond all"
    if ratio >= 1e6:
        return f"{ratio:.0e} times"
    return f"{ratio:,.0f} times" if ratio >= 100 else f"{ratio:.2g} times"


def in_words(finding: Finding) -> str:
    """A finding as a clause: the quantity, how far it is off, and what rounding allows.

    >>> in_words(Finding("loss", "JAX", 2, 0.03, 1e-6))
    'loss at update 2 (JAX) is off by 3.0e-02, where rounding allows 1.0e-06 (30,000 times)'
    >>> in_words(Finding("counter updates", "JAX", 0, 3, 0))
    'counter updates (JAX) is off by 3, and counters must be exact'
    """
    if finding.quantity.startswith("counter"):
        return f"{finding.place} is off by {finding.error:.0f}, and counters must be exact"
    if not finding.allowed and finding.error == float("inf"):
        return f"{finding.place} was not reached in order"
    if not finding.allowed:
        return f"{finding.place} is off by {finding.error:.0f}, and must be exact"
    return (
        f"{finding.place} is off by {finding.error:.1e}, where rounding allows "
        f"{finding.allowed:.1e} ({times(finding.ratio)})"
    )


def as_data(told: Told) -> dict[str, Any]:
    """The whole report as JSON-ready data; a number that is not finite becomes its name."""
    run = told.run
    return plain(
        {
            "schema": SCHEMA,
            "verdict": told.verdict,
            "sentence": told.sentence,
            "complete": not told.interrupted and len(told.results) == told.planned,
            "notes": told.notes,
            "command": told.command,
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "settings": {
                "updates": run.updates,
                "seed": run.seed,
                "fault": run.fault.name if run.fault else None,
                "window": WINDOW,
                "model": asdict(run.sizes),
            },
            "text": {
                "source": told.source,
                "documents": len(run.documents),
                "examples": len(run.examples),
            },
            "versions": versions(),
            "machine": machine(),
            "tolerances": {
                name: {"value": value, "reason": reason}
                for name, (value, reason) in TOLERANCES.items()
            },
            "cases": [_case_data(result) for result in told.results],
        }
    )


def versions() -> dict[str, str]:
    """Of Python and of every package that takes part."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def machine() -> dict[str, Any]:
    """What the run ran on."""
    import jax

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "jax device": jax.devices()[0].device_kind,
    }


def worst_by_quantity(result: CaseResult) -> list[Finding]:
    """Of each quantity and side the finding that is furthest out, in the order of the run."""
    chosen: dict[tuple[str, str, bool], Finding] = {}
    for finding in result.findings:
        key = (finding.quantity, finding.side, finding.parameter is not None)
        if key not in chosen or finding.ratio > chosen[key].ratio:
            chosen[key] = finding
    return list(chosen.values())


def _case_data(result: CaseResult) -> dict[str, Any]:
    return {
        "name": result.case.name,
        "meaning": result.case.meaning,
        "verdict": "equal" if result.equal else "differ",
        "seconds": round(result.seconds, 2),
        "compared": len(result.findings),
        "first_failure": finding_data(result.failure) if result.failure else None,
        "worst": finding_data(result.worst),
        "quantities": [finding_data(finding) for finding in worst_by_quantity(result)],
        "parameters": [finding_data(finding) for finding in result.parameters],
        "losses": {"JAX": result.jax, "PyTorch": result.torch},
        "tokens": result.tokens,
        "counters": result.counters,
    }


def finding_data(finding: Finding) -> dict[str, Any]:
    """A finding as JSON-ready data."""
    return asdict(finding) | {"ratio": finding.ratio, "passed": finding.passed}


def plain(value: Any) -> Any:
    """Data in which a number that is not finite has become its name, as JSON wants it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value

"""RunRecord: what a run did, as a file that a person and a program can read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime as dt
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jax_accum import _record_schema as schema
from jax_accum._group import Dropped, Group
from jax_accum._ledger import Ledger, Totals
from jax_accum._peaks import read_memory
from jax_accum._plan import BatchPlan
from jax_accum._record_diff import Difference, differences
from jax_accum._record_table import table

MOST_IDS = 100
"""IDs of left-out examples that are listed; `counts.examples_dropped` counts all."""


@dataclasses.dataclass(kw_only=True)
class RunRecord:
    """What a run was set to do, and did.

    The first fields are given; the others are filled by the methods and by `finish`.

    Args:
      plan: m, A and D.
      normalisation: per term of the loss, what it is divided by: `{"loss": "supervised tokens"}`.
      optimizer: in words, with its hyperparameters.
      data: where the examples came from, and in which order.
      precision: dtypes of `params`, `compute` and `accumulator`; float32 where not given.
      schedule_unit: what schedules advance with: updates, attempts, microbatches, examples, tokens.
      last: what becomes of a short last group.
      mesh: the device mesh, if there is one.
      data_axes: which of its axes are data.
      seed: of all randomness.

    Attributes:
      counts: attempts, updates, skips, examples, tokens: a `Totals` as a dict.
      last_group: the policy, how many groups were short, and the first IDs of those left out.
      loss_scale: its history: attempts made so far, and the scale from then on.
      plan_changes: at how many examples the partition changed, from which to which.
      peaks: per device: bytes at the peak and before the run, and how they were read.
      preparation, trials, accepted: what was done before the run counted, what was tried and came
        to what, and which results were taken over: apart, so that none is taken for another.
      environment: versions and devices.
      times: when it began (UTC), seconds it took.

    Raises:
      ValueError: a field that the schema does not allow.

    Example:
      >>> import jax_accum as ja
      >>> plan = ja.BatchPlan(microbatch_size=2, microbatches=4)
      >>> record = ja.RunRecord(plan=plan, normalisation={"loss": "supervised tokens"},
      ...                       optimizer="sgd(0.1)", data="numbers")
      >>> other = ja.RunRecord(plan=plan, normalisation={"loss": "supervised tokens"},
      ...                      optimizer="sgd(0.2)", data="numbers")
      >>> print(*record.diff(other))
      optimizer: sgd(0.1) and sgd(0.2). Another optimizer or other hyperparameters.
    """

    plan: BatchPlan
    normalisation: Mapping[str, str]
    optimizer: str
    data: str
    precision: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schedule_unit: str = "updates"
    last: str = "keep"
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None
    data_axes: tuple[str, ...] = ("data",)
    seed: int | None = None
    processes: int = dataclasses.field(default_factory=jax.process_count)
    counts: dict[str, Any] = dataclasses.field(default_factory=lambda: dataclasses.asdict(Totals()))
    last_group: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss_scale: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    plan_changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    peaks: list[dict[str, Any]] = dataclasses.field(default_factory=lambda: _peaks())
    preparation: list[str] = dataclasses.field(default_factory=list)
    trials: list[dict[str, str]] = dataclasses.field(default_factory=list)
    accepted: list[str] = dataclasses.field(default_factory=list)
    environment: dict[str, Any] = dataclasses.field(default_factory=lambda: _environment())
    times: dict[str, Any] = dataclasses.field(default_factory=lambda: _times())

    def __post_init__(self) -> None:
        self.precision = {
            name: _dtype_name(self.precision.get(name, "float32"))
            for name in ("params", "compute", "accumulator")
        }
        self.last_group = {
            "policy": self.last,
            "partial_groups": 0,
            "dropped_ids": [],
            **self.last_group,
        }
        schema.validate(self.as_dict())

    def attempt(self, group: Group) -> None:
        """Takes note of a group: whether it was a short one."""
        self.last_group["partial_groups"] += group.partial

    def note_loss_scale(self, attempts: int, scale: Any) -> None:
        """Takes note of the loss scale after so many attempts, if it moved since the last note."""
        scale = float(scale)
        if not self.loss_scale or self.loss_scale[-1]["scale"] != scale:
            self.loss_scale.append({"attempts": attempts, "scale": scale})

    def drop(self, dropped: Dropped) -> None:
        """Takes note of examples that were left out: `groups(...).dropped`."""
        ids = self.last_group["dropped_ids"]
        ids += [_plain(name) for name in dropped.ids[: MOST_IDS - len(ids)]]

    def change_plan(
        self, plan: BatchPlan, examples: int, *, mesh: Mesh | AbstractMesh | None = None
    ) -> None:
        """Takes note that the run goes on in another partition, after so many examples.

        `mesh`, if given, is the one from now on.
        """
        before, self.plan, self.processes = self.plan, plan, jax.process_count()
        self.mesh = self.mesh if mesh is None else mesh
        change = {"examples": examples, "before": _plan_dict(before), "after": _plan_dict(plan)}
        self.plan_changes.append(change)

    def finish(self, ledger: Ledger) -> None:
        """Takes over what the ledger counted, the peaks, and the time."""
        self.counts = dataclasses.asdict(ledger.totals)
        before = {peak["device"]: peak["baseline_bytes"] for peak in self.peaks}
        self.peaks = [
            {
                "device": m.device,
                "baseline_bytes": before.get(m.device, 0),
                "peak_bytes": m.peak,
                "how": m.how,
            }
            for m in read_memory()
        ]
        began = dt.datetime.fromisoformat(self.times["started"])
        # A clock may be set back meanwhile.
        self.times["seconds"] = max(0.0, (_now() - began).total_seconds())

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON holds it."""
        values = {
            field.name: copy.deepcopy(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("plan", "mesh", "data_axes", "last")
        }
        axes = {} if self.mesh is None else dict(_shape(self.mesh))
        data_axes = [name for name in self.data_axes if self.mesh is not None]
        return {
            "schema_version": schema.SCHEMA_VERSION,
            "plan": _plan_dict(self.plan),
            "mesh": {"axes": {str(k): int(n) for k, n in axes.items()}, "data_axes": data_axes},
            **values,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunRecord:
        """The record from what `as_dict` returned.

        Raises:
          ValueError: it is no valid record, or one of a newer schema.
        """
        schema.validate(data)
        fields = dict(copy.deepcopy(data))
        del fields["schema_version"]
        mesh, plan = fields.pop("mesh"), fields.pop("plan")
        del plan["examples_per_update"]
        return cls(
            plan=BatchPlan(**plan),
            mesh=mesh["axes"] or None,
            data_axes=tuple(mesh["data_axes"]),
            last=fields["last_group"]["policy"],
            **fields,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON; either all of it or, if that fails, nothing: an older file stays.

        Raises:
          ValueError: the record is not valid.
          OSError: the file cannot be written.
        """
        data = self.as_dict()
        schema.validate(data)
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        try:
            text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")
            os.replace(partial, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise OSError(
                error.errno,
                f"the record could not be written ({error.strerror}); what was there before "
                "is untouched",
                str(target),
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Reads what `save` wrote.

        Raises:
          ValueError: not JSON, not a valid record, or of a newer schema; with the path.
          OSError: the file cannot be read.
        """
        text = Path(path).read_bytes()
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def diff(self, other: RunRecord) -> list[Difference]:
        """What makes the loss curves of two runs incomparable, the axis first; then the rest."""
        return differences(self.as_dict(), other.as_dict())

    def describe(self) -> str:
        """The record as a table in Markdown."""
        return table(self.as_dict())


def _shape(mesh: Any) -> Mapping[Any, int]:
    return mesh if isinstance(mesh, Mapping) else mesh.shape


def _plan_dict(plan: BatchPlan) -> dict[str, int]:
    return {**dataclasses.asdict(plan), "examples_per_update": plan.examples_per_update}


def _plain(name: Any) -> Any:
    return name if isinstance(name, (int, str)) else str(name)


def _dtype_name(dtype: Any) -> str:
    return str(jnp.dtype(dtype))


def _peaks() -> list[dict[str, Any]]:
    return [
        {"device": m.device, "baseline_bytes": m.now, "peak_bytes": m.peak, "how": m.how}
        for m in read_memory()
    ]


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _times() -> dict[str, Any]:
    return {"started": _now().isoformat(timespec="seconds"), "seconds": 0.0}


def _environment() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in ("jax-accum", "jax", "jaxlib", "optax", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "versions": versions,
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()],
    }

"""Checkpoints that survive being killed: written whole or not at all, checked when read.

The arrays are written by Orbax (`pip install 'jax-accum[checkpoint]'`). What this adds is small: a
folder per checkpoint that gets its name when it is complete, checksums of all its files, the
facts beside the arrays (data position, ledger, record), and the refusal to go on in the
middle of a group with another partition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jax_accum import _checkpoint_arrays as arrays
from jax_accum._checks import checked_int
from jax_accum._plan import BatchPlan

__all__ = ["Checkpoints", "Restored"]

Tree = Any
_logger = logging.getLogger("jax_accum")
_STATE, _FACTS, _SUMS = "state", "facts.json", "checksums.json"
_PARTIAL = ".partial-"


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint as it was read.

    Attributes:
      number: that it was saved under.
      state: the tree of arrays.
      facts: what was saved beside it.
      plan_before: the partition it was saved with, if that is another one; or `None`.
    """

    number: int
    state: Tree
    facts: dict[str, Any]
    plan_before: BatchPlan | None


class Checkpoints:
    """A folder of checkpoints, of which the newest sound one is read.

    A checkpoint is written beside the others and renamed when all of it is there, so that a
    process killed at any moment leaves the one before. Bytes that change later are
    found by their checksums, and the one before is read instead.

    With several processes all call `save` and `restore` together, on a file system they share.

    Args:
      folder: made if missing.
      keep: how many to keep, the newest; 2 at least, so that there is one before.

    Raises:
      ImportError: Orbax is not installed.
      ValueError: `keep` below 2.

    Example:
      >>> import tempfile, jax.numpy as jnp, jax_accum as ja
      >>> plan = ja.BatchPlan(microbatch_size=2, microbatches=4)
      >>> saved = ja.checkpoint.Checkpoints(tempfile.mkdtemp())
      >>> saved.save(3, {"w": jnp.ones(2)}, plan, facts={"position": 24})
      >>> found = saved.restore({"w": jnp.zeros(2)}, plan)
      >>> found.number, found.state["w"].tolist(), found.facts["position"]
      (3, [1.0, 1.0], 24)
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        if checked_int(keep, "keep") < 2:
            raise ValueError(
                "keep must be at least 2: with one, there is none before a damaged one."
            )
        arrays.orbax()
        self._folder = Path(folder).absolute()
        self._keep = keep

    def numbers(self) -> list[int]:
        """Numbers of the complete checkpoints, rising; not all need be sound."""
        names = [path.name for path in self._folder.glob("*")] if self._folder.exists() else []
        return sorted(int(name) for name in names if name.isdecimal())

    def save(
        self,
        number: int,
        state: Tree,
        plan: BatchPlan,
        *,
        facts: Mapping[str, Any] | None = None,
        open_microbatches: int = 0,
    ) -> None:
        """Writes a checkpoint, and removes those behind the newest `keep`.

        Args:
          number: rises from save to save: attempts, or microbatches.
          state: tree of arrays: parameters, optimizer state with accumulator, loss scale and
            counters, random keys. Typed keys are kept as such.
          plan: the partition that it was trained in.
          facts: whatever JSON holds: data position, epoch, `ledger.state()`, `record.as_dict()`.
          open_microbatches: how many the open group has, `state.mini_step` of `MultiSteps`; 0 at a
            group's boundary.

        Raises:
          OSError: it could not be written; those before are untouched.
          ValueError: a checkpoint of that number exists.
          TypeError: `facts` hold something that JSON does not.
        """
        if number in self.numbers():
            raise ValueError(f"checkpoint {number} exists in {self._folder}: numbers must rise.")
        words = json.dumps(
            {
                "plan": dataclasses.asdict(plan),
                "open_microbatches": int(open_microbatches),
                "facts": dict(facts or {}),
            }
        )
        first = jax.process_index() == 0
        partial = self._folder / f"{number:012d}{_PARTIAL}save"
        try:
            if first:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._remove_partial()
            _wait_for_all("begin")
            arrays.write(partial / _STATE, state)
            _wait_for_all("written")
            if first:
                (partial / _FACTS).write_text(words, encoding="utf-8")
                sums = json.dumps(_checksums(partial))
                (partial / _SUMS).write_text(sums, encoding="utf-8")
                _flush(partial)
                os.replace(partial, self._folder / f"{number:012d}")
                _flush_folder(self._folder)
        except Exception as error:
            if first:
                shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                getattr(error, "errno", None) or 5,
                f"checkpoint {number} could not be written ({_first_line(error)}); those before it "
                "are untouched. Is the disk full?",
                str(self._folder),
            ) from error
        if first:
            for old in self.numbers()[: -self._keep]:
                shutil.rmtree(self._folder / f"{old:012d}", ignore_errors=True)
        _wait_for_all("renamed")

    def restore(self, like: Tree, plan: BatchPlan) -> Restored | None:
        """Reads the newest checkpoint that is sound; `None` if there is none.

        Args:
          like: a state of the same structure, shapes, dtypes and shardings: a fresh one.
          plan: the partition to go on in. At a group's boundary it may be another than before.

        Raises:
          ValueError: saved in the middle of a group of another partition; or all there are
            are damaged; or the tree is another than `like`.
        """
        numbers = self.numbers()
        for number in reversed(numbers):
            path = self._folder / f"{number:012d}"
            if problem := _damage(path):
                _logger.warning(
                    "checkpoint %d is damaged (%s): trying the one before", number, problem
                )
                continue
            words = json.loads((path / _FACTS).read_text(encoding="utf-8"))
            before = BatchPlan(**words["plan"])
            if before != plan and words["open_microbatches"]:
                raise ValueError(
                    f"checkpoint {number} was saved with {words['open_microbatches']} microbatches "
                    f"in an open group of {_short(before)}, and cannot go on with {_short(plan)}: "
                    "go on with the same plan to the end of the group, or from a checkpoint at a "
                    "group's boundary."
                )
            state = arrays.read(path / _STATE, like)
            changed = None if before == plan else before
            return Restored(number, state, words["facts"], changed)
        if numbers:
            raise ValueError(
                f"all checkpoints in {self._folder} are damaged ({', '.join(map(str, numbers))}): "
                "bring back a copy, or start from the beginning in another folder."
            )
        return None

    def _remove_partial(self) -> None:
        for path in self._folder.glob(f"*{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != _SUMS)
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def _damage(folder: Path) -> str:
    """What is wrong with a checkpoint, or nothing."""
    try:
        wanted = json.loads((folder / _SUMS).read_text(encoding="utf-8"))
        found = _checksums(folder)
    except (OSError, ValueError) as error:
        return _first_line(error)
    if wanted == found:
        return ""
    names = {*wanted, *found} if isinstance(wanted, dict) else {_SUMS}
    bad = sorted(n for n in names if not isinstance(wanted, dict) or wanted.get(n) != found.get(n))
    return f"{bad[0]} is not what was written"


def _flush(folder: Path) -> None:
    """Waits until all files are on the disk, so that the new name never comes before them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _wait_for_all(what: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"jax_accum.checkpoint {what}")


def _short(plan: BatchPlan) -> str:
    return f"m={plan.microbatch_size}, A={plan.microbatches}, D={plan.replicas}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n") or [""])[0] or type(error).__name__

"""The schema of a run record: which fields it has, of what kind, and a check of all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from jax_accum._ledger import Totals

SCHEMA_VERSION = 1
UNITS = ("updates", "attempts", "microbatches", "examples", "tokens")

Check = Callable[[Any, str], list[str]]
"""Takes a value and where it stands; returns what is wrong."""


def validate(data: Any) -> None:
    """Checks a record as JSON holds it.

    Raises:
      ValueError: with everything that is wrong, a line each. A record of a newer schema is
        refused as such.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a run record is a JSON object, got {type(data).__name__}.")
    version = data.get("schema_version")
    if not _is_int(version) or version < 1:
        raise ValueError(f"schema_version must be an integer of at least 1, got {version!r}.")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"schema_version is {version}, and this jax-accum reads up to {SCHEMA_VERSION}: read "
            "the record with the version that wrote it, or a newer one."
        )
    if problems := _record(data, ""):
        raise ValueError("not a valid run record:\n" + "\n".join(f"  {p}" for p in problems))


def _is_int(x: Any) -> TypeGuard[int]:
    return isinstance(x, int) and not isinstance(x, bool)


def _integer(least: int) -> Check:
    def check(x: Any, at: str) -> list[str]:
        if _is_int(x) and x >= least:
            return []
        return [f"{at} must be an integer of at least {least}, got {x!r}"]

    return check


def _number(x: Any, at: str) -> list[str]:
    if (_is_int(x) or isinstance(x, float)) and math.isfinite(x) and x >= 0:
        return []
    return [f"{at} must be a finite number of at least 0, got {x!r}"]


def _text(x: Any, at: str) -> list[str]:
    return [] if isinstance(x, str) else [f"{at} must be text, got {x!r}"]


def _one_of(*choices: str) -> Check:
    def check(x: Any, at: str) -> list[str]:
        return [] if x in choices else [f"{at} must be one of {', '.join(choices)}, got {x!r}"]

    return check


def _anything(x: Any, at: str) -> list[str]:
    return []


def _or_null(check: Check) -> Check:
    return lambda x, at: [] if x is None else check(x, at)


def _list(of: Check) -> Check:
    def check(x: Any, at: str) -> list[str]:
        if not isinstance(x, list):
            return [f"{at} must be a list, got {x!r}"]
        return [p for i, item in enumerate(x) for p in of(item, f"{at}[{i}]")]

    return check


def _table(of: Check) -> Check:
    """An object with keys of any name."""

    def check(x: Any, at: str) -> list[str]:
        if not isinstance(x, Mapping):
            return [f"{at} must be an object, got {x!r}"]
        return [p for name, item in x.items() for p in of(item, f"{at}.{name}")]

    return check


def _object(**fields: Check) -> Check:
    """An object with exactly these keys."""

    def check(x: Any, at: str) -> list[str]:
        if not isinstance(x, Mapping):
            return [f"{at} must be an object, got {x!r}"]
        dot = f"{at}." if at else ""
        problems = [f"{dot}{name} is missing" for name in fields if name not in x]
        problems += [f"{dot}{name} is no field of this schema" for name in x if name not in fields]
        return problems + [
            p for name, of in fields.items() if name in x for p in of(x[name], f"{dot}{name}")
        ]

    return check


def _plan(x: Any, at: str) -> list[str]:
    size = _integer(1)
    fields = ("microbatch_size", "microbatches", "replicas", "examples_per_update")
    problems = _object(**dict.fromkeys(fields, size))(x, at)
    if not problems:
        m, a, d, n = (x[name] for name in fields)
        if m * a * d != n:
            problems.append(f"{at}.examples_per_update is {n}, but {m} × {a} × {d} = {m * a * d}")
    return problems


def _counts(x: Any, at: str) -> list[str]:
    names = [field.name for field in dataclasses.fields(Totals)]
    kinds = {name: _number if name.startswith("tokens") else _integer(0) for name in names}
    problems = _object(**kinds)(x, at)
    if not problems:
        parts = x["updates"] + x["skipped_nonfinite"] + x["skipped_empty"]
        if parts != x["attempts"]:
            problems.append(f"{at}: {x['attempts']} attempts, but updates and skips make {parts}")
    return problems


def _mesh(x: Any, at: str) -> list[str]:
    problems = _object(axes=_table(_integer(1)), data_axes=_list(_text))(x, at)
    if not problems and (missing := [name for name in x["data_axes"] if name not in x["axes"]]):
        problems.append(f"{at}.data_axes names {missing}, which are no axes of the mesh")
    return problems


_record = _object(
    schema_version=_integer(1),
    plan=_plan,
    mesh=_mesh,
    processes=_integer(1),
    precision=_object(params=_text, compute=_text, accumulator=_text),
    normalisation=_table(_text),
    schedule_unit=_one_of(*UNITS),
    optimizer=_text,
    data=_text,
    seed=_or_null(_integer(0)),
    last_group=_object(
        policy=_one_of("keep", "drop", "error"),
        partial_groups=_integer(0),
        dropped_ids=_list(_anything),
    ),
    counts=_counts,
    loss_scale=_list(_object(attempts=_integer(0), scale=_number)),
    plan_changes=_list(_object(examples=_integer(0), before=_plan, after=_plan)),
    peaks=_list(
        _object(device=_text, baseline_bytes=_integer(0), peak_bytes=_integer(0), how=_text)
    ),
    preparation=_list(_text),
    trials=_list(_object(what=_text, outcome=_text)),
    accepted=_list(_text),
    environment=_object(versions=_table(_text), devices=_list(_text)),
    times=_object(started=_text, seconds=_number),
)

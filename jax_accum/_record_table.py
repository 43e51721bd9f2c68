"""A run record as a table that a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(data: Mapping[str, Any]) -> str:
    """A Markdown table of all fields, those of objects as `plan.replicas`."""
    rows = ["| field | value |", "| --- | --- |"]
    for name, value in _flat(data):
        words = str(value).replace("|", "\\|")
        rows.append(f"| {name} | {words} |")
    return "\n".join(rows)


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in data.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            rows.append((prefix + name, "; ".join(map(_in_words, value)) or "none"))
        else:
            rows.append((prefix + name, value))
    return rows


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(x)}" for name, x in value.items())
    return str(value)

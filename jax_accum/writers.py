"""Writers of logged values: to the console, to JSON lines, to TensorBoard.

A writer is anything with `log(metrics, axes)`. The axes say where the run stands: updates,
examples, tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Console", "JsonLines", "TensorBoard", "Writer"]


class Writer(Protocol):
    """Takes values and the axes they belong to."""

    def log(self, metrics: Mapping[str, float], axes: Mapping[str, int | float]) -> None:
        """Writes `metrics`, reached at `axes`."""


class Console:
    """One line per call.

    Args:
      write: takes the line; `print` by default.

    Example:
      >>> Console().log({"loss": 2.5}, {"updates": 3, "examples": 96})
      updates 3  examples 96  loss 2.5
    """

    def __init__(self, write: Any = print) -> None:
        self._write = write

    def log(self, metrics: Mapping[str, float], axes: Mapping[str, int | float]) -> None:
        """Writes `metrics`, reached at `axes`."""
        parts = [f"{name} {value:g}" for name, value in metrics.items()]
        self._write("  ".join([f"{name} {n}" for name, n in axes.items()] + parts))


class JsonLines:
    """One JSON object per call: `{"axes": {"updates": 3, ...}, "metrics": {"loss": 2.5}}`.

    Each line is flushed. A NaN or infinity is written as text, which JSON can hold. What else JSON
    holds (lists, objects) is written as it is: the IDs that a group had, for instance.

    Args:
      path: the file; it is appended to.
      after: where the run goes on after a stop, `ledger.axes`. Lines behind it, and a last line
        that was cut short, are taken out: they will be written again. `None` keeps all.

    Raises:
      ValueError: with `after`, a line that is not one of this writer.
      OSError: the file cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, after: Mapping[str, int | float] | None = None
    ) -> None:
        self._path = Path(path)
        if after is not None and self._path.exists():
            self._rewind(after)

    def _rewind(self, after: Mapping[str, int | float]) -> None:
        kept = []
        text = self._path.read_text(encoding="utf-8")
        *lines, _cut_short = text.split("\n")
        for number, line in enumerate(lines, 1):
            try:
                axes = json.loads(line)["axes"]
                behind = any(axes[name] > n for name, n in after.items())
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self._path}:{number} is not a line of this log ({error!r}): move the file "
                    "away, or choose another path."
                ) from error
            if not behind:
                kept.append(line + "\n")
        if (whole := "".join(kept)) != text:
            partial = self._path.with_name(self._path.name + ".partial")
            partial.write_text(whole, encoding="utf-8")
            os.replace(partial, self._path)

    def log(self, metrics: Mapping[str, float], axes: Mapping[str, int | float]) -> None:
        """Writes `metrics`, reached at `axes`."""
        line = json.dumps(
            {"axes": dict(axes), "metrics": {k: _plain(v) for k, v in metrics.items()}}
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class TensorBoard:
    """Scalars for TensorBoard, whose one axis is named in the tag: `loss/by_tokens`.

    Args:
      folder: where the event files go.
      axes: the axes to plot against, a curve for each.
      summary_writer: an object with `add_scalar(tag, value, global_step)`; made with PyTorch's
        `torch.utils.tensorboard` or `tensorboardX` by default.

    Raises:
      ImportError: neither is installed, and no `summary_writer` given.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        axes: Sequence[str] = ("updates",),
        summary_writer: Any = None,
    ) -> None:
        self._axes = tuple(axes)
        self._summary = _summary_writer(folder) if summary_writer is None else summary_writer

    def log(self, metrics: Mapping[str, float], axes: Mapping[str, int | float]) -> None:
        """Writes `metrics`, reached at `axes`."""
        if missing := [name for name in self._axes if name not in axes]:
            raise ValueError(f"axes lacks {missing}: it has {sorted(axes)}.")
        for axis in self._axes:
            for name, value in metrics.items():
                self._summary.add_scalar(f"{name}/by_{axis}", value, int(axes[axis]))

    def close(self) -> None:
        """Writes what is still waiting to be written, and closes the file."""
        self._summary.close()


def _summary_writer(folder: str | os.PathLike[str]) -> Any:
    import importlib

    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(module).SummaryWriter(str(folder))
        except ImportError:
            continue
    raise ImportError(
        "TensorBoard needs a package that writes its files: pip install 'jax-accum[tensorboard]'."
    )


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    number = value if isinstance(value, (int, str, dict, list)) else float(value)
    if isinstance(number, float) and (number != number or number in (float("inf"), -float("inf"))):
        return str(number)
    return number

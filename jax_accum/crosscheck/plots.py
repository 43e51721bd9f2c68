"""The report's pictures: how far each case is off, both sides' losses, where gradients differ."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from jax_accum.crosscheck.run import CaseResult

JAX, TORCH, ALLOWED, EQUAL, DIFFER = "#1f5fa8", "#d9651a", "#6b6b6b", "#2e7d4f", "#b3261e"
# Differences of exactly 0 have no place on a logarithmic axis; they are drawn here.
SMALLEST = 1e-17
COLUMNS = 8


def draw_all(results: Sequence[CaseResult]) -> dict[str, bytes]:
    """PNGs by file name; none where nothing was compared."""
    if not results:
        return {}
    figures = {
        "cases.png": draw_cases(results),
        "losses.png": draw_losses(representatives(results)[:COLUMNS]),
        "parameters.png": draw_parameters(representatives(results, by=("dtype",))),
    }
    return {name: _png(figure) for name, figure in figures.items()}


def representatives(
    results: Sequence[CaseResult], by: tuple[str, ...] = ("optimizer", "dtype")
) -> list[CaseResult]:
    """Of each kind of case the one that is furthest out, in the order of the matrix."""
    chosen: dict[tuple[str, ...], CaseResult] = {}
    for result in results:
        key = tuple(getattr(result.case, name) for name in by)
        if key not in chosen or result.worst.ratio > chosen[key].worst.ratio:
            chosen[key] = result
    return list(chosen.values())


def draw_cases(results: Sequence[CaseResult]) -> Figure:
    """Worst difference of each case, as a multiple of what rounding allows."""
    figure = Figure(figsize=(8, 1.2 + 0.24 * len(results)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(results):
        ratio = min(max(result.worst.ratio, 1e-3), 1e15)
        color = EQUAL if result.equal else DIFFER
        axes.plot([1e-3, ratio], [row, row], color=color, alpha=0.35, linewidth=2)
        axes.plot([ratio], [row], "o" if result.equal else "X", color=color, markersize=6)
    axes.axvline(1, color=ALLOWED, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(results)), [r.case.name for r in results], fontsize=8)
    axes.set_ylim(len(results) - 0.3, -0.7)
    axes.set_xscale("log")
    axes.set_xlim(1e-3, max(30, 3 * min(max(r.worst.ratio for r in results), 1e15)))
    axes.set_xlabel("worst difference ÷ what rounding allows (left of the dashed line: equal)")
    axes.set_title("Every case against its tolerance", loc="left", fontsize=11)
    _plain(axes)
    return figure


def draw_losses(results: Sequence[CaseResult]) -> Figure:
    """Loss of JAX and PyTorch over each other, and under it how far they are apart."""
    columns = len(results)
    figure = Figure(figsize=(max(8.4, 3.1 * columns), 5.4), layout="constrained")
    grid = figure.subplots(2, columns, squeeze=False, sharex="col", height_ratios=(3, 2))
    for column, result in enumerate(results):
        top, bottom = grid[0][column], grid[1][column]
        jax, torch = result.jax.get("accumulated", []), result.torch.get("accumulated", [])
        found = [f for f in result.findings if f.quantity == "loss" and f.side == "JAX vs PyTorch"]
        made = [f.update for f in found]  # the loss of a skip is not compared
        updates = range(1, len(jax) + 1)
        jax, torch = [jax[i - 1] for i in made], [torch[i - 1] for i in made]
        top.plot(made, jax, color=JAX, linewidth=2, label="JAX")
        top.plot(
            made, torch, "o", color=TORCH, markersize=7, markerfacecolor="none", label="PyTorch"
        )
        top.set_title(result.case.name, fontsize=8.5)
        apart = [max(f.error, SMALLEST) for f in found]
        bottom.plot(made, apart, "o-", color="black", markersize=4, label="difference")
        bottom.plot(
            made,
            [f.allowed for f in found],
            "--",
            color=ALLOWED,
            label="what rounding allows",
        )
        bottom.set_yscale("log")
        bottom.set_xlabel("update")
        bottom.set_xticks(list(updates)[:: max(1, len(updates) // 6)])
        _plain(top)
        _plain(bottom)
    grid[0][0].set_ylabel("loss (nats per token)")
    grid[1][0].set_ylabel("relative difference")
    grid[0][0].legend(frameon=False, fontsize=8)
    grid[1][0].legend(frameon=False, fontsize=8)
    return figure


def draw_parameters(results: Sequence[CaseResult]) -> Figure:
    """How far the first gradients of JAX and PyTorch are apart, parameter by parameter."""
    rows = max(len(result.parameters) for result in results)
    width = max(8.4, 3.1 * len(results))
    figure = Figure(figsize=(width, 1.3 + 0.2 * rows), layout="constrained")
    grid = figure.subplots(1, len(results), squeeze=False)[0]
    shown: list[str] = []
    for axes, result in zip(grid, results, strict=True):
        found = result.parameters
        places = range(len(found))
        apart = [max(f.error, SMALLEST) for f in found]
        allowed = [f.allowed for f in found]
        axes.plot(apart, places, "o", color=JAX, markersize=4, label="difference")
        if found:
            worst = max(places, key=lambda i: found[i].ratio)
            label = "nearest to what is allowed"
            axes.plot(apart[worst], worst, "o", color=DIFFER, markersize=6, label=label)
        label = "what rounding allows"
        axes.plot(allowed, places, "|", color=ALLOWED, markersize=9, label=label)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())  # within one decade they would overlap
        axes.set_title(textwrap.fill(result.case.name, 26), fontsize=8)
        axes.set_xlabel("relative difference of the gradient", fontsize=8)
        names = [f.parameter or "" for f in found]
        # The models of the two matrices differ; a column like the one before it needs no names.
        axes.set_yticks(places, names if names != shown else [""] * len(names), fontsize=7)
        axes.set_ylim(len(found) - 0.3, -0.7)
        shown = names
        _plain(axes)
    marks = grid[0].get_legend_handles_labels()
    figure.legend(*marks, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    # No date and no version inside: the same run gives the same bytes.
    figure.savefig(file, format="png", dpi=130, metadata={"Software": None})
    return file.getvalue()

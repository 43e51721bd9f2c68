"""The picture of a search: peak memory against microbatch size, and the budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jax_accum.memory._budget import readable
from jax_accum.memory._search import Search

FITS, NOT, LINE, BUDGET = "#2e7d4f", "#b3261e", "#6b6b6b", "#1f5fa8"


def draw(search: Search, title: str = "") -> Figure:
    """Compiled peaks as points, the fitted line, the budget, and the plan that was chosen."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    sizes = [row.plan.microbatch_size for row in search.rows]
    unit, name = _unit(max(search.budget, *(row.peak or 0 for row in search.rows)))
    between = np.geomspace(sizes[0], sizes[-1], 100)
    peaks = [(search.line.fixed + search.line.per_example * m) / unit for m in between]
    axes.plot(between, peaks, "-", color=LINE, linewidth=1)
    for row in search.rows:
        if row.peak is not None:
            filled = row.how != "predicted"
            color = FITS if row.fits else NOT
            axes.plot(
                row.plan.microbatch_size,
                row.peak / unit,
                "o",
                color=color,
                markersize=7,
                markerfacecolor=color if filled else "white",
            )
    axes.axhline(search.budget / unit, color=BUDGET, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"budget {readable(search.budget)}",
        (1, search.budget / unit),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color=BUDGET,
        fontsize=9,
    )
    chosen = search.chosen
    assert chosen.peak is not None
    axes.annotate(
        f"m = {chosen.plan.microbatch_size}, A = {chosen.plan.microbatches}",
        (chosen.plan.microbatch_size, chosen.peak / unit),
        xytext=(0, -18),
        textcoords="offset points",
        ha="center",
        color=FITS,
        fontsize=9,
        fontweight="bold",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(m) for m in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_xlabel("examples in a microbatch, m")
    axes.set_ylabel(f"peak memory of a device, {name}")
    axes.set_title(
        title + "\ngreen fits, red does not; filled: compiled, open: predicted by the line",
        loc="left",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    return figure


def save(search: Search, path: Path, title: str = "") -> None:
    """Writes the picture as PNG.

    Raises:
      OSError: it cannot be written.
    """
    draw(search, title).savefig(path, format="png", dpi=130, metadata={"Software": None})


def _unit(largest: int) -> tuple[int, str]:
    for power, name in ((3, "GiB"), (2, "MiB")):
        if largest >= 4 * 1024**power:
            return 1024**power, name
    return 1024, "KiB"

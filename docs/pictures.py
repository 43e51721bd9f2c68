"""Draws the pictures of the documentation: `python docs/pictures.py`, into `docs/_static`.

They are checked in, so that the pages show them wherever they are read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import jax_accum as ja

FOLDER = Path(__file__).parent / "_static"
BLUE, ORANGE, GREY, RED = "#3b6ea5", "#d9822b", "#8a8f98", "#b03a48"
mpl.rcParams.update(
    {
        "svg.hashsalt": "jax-accum",
        "svg.fonttype": "path",  # the same everywhere, whatever fonts there are
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def box(ax: Axes, x: float, y: float, width: float, text: str, color: str = BLUE) -> None:
    """A labelled box of height 0.8, its lower left corner at (x, y)."""
    ax.add_patch(plt.Rectangle((x, y), width, 0.8, facecolor=color, alpha=0.18, edgecolor=color))
    ax.text(x + width / 2, y + 0.4, text, ha="center", va="center", fontsize=9)


def group() -> Figure:
    """A group over replicas and microbatches, and the one division."""
    fig, ax = plt.subplots(figsize=(6.4, 4.2))
    weights = [[1, 3, 2], [2, 10, 4]]
    for d, row in enumerate(weights):
        y = 3.2 - 1.3 * d
        ax.text(-0.15, y + 0.4, f"replica {d}", ha="right", va="center")
        for a, weight in enumerate(row):
            box(ax, 1.15 * a, y, 1.05, f"$S_{{{a}{d}}}$\n$W_{{{a}{d}}}={weight}$")
        box(ax, 3.95, y, 1.2, f"$\\Sigma S$\n$\\Sigma W={sum(row)}$", ORANGE)
        ax.annotate("", (3.92, y + 0.4), (3.42, y + 0.4), arrowprops={"arrowstyle": "->"})
    ax.annotate("", (4.55, 1.25), (4.55, 1.9), arrowprops={"arrowstyle": "->"})
    around = {"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.4"}
    ax.annotate("", (5.4, 0.8), (5.2, 3.6), arrowprops=around)
    for a in range(3):
        ax.text(0.52 + 1.15 * a, 4.15, f"microbatch {a}", ha="center", color=GREY, fontsize=9)
    ax.text(4.55, 4.15, "added locally", ha="center", color=GREY, fontsize=9)
    total = sum(map(sum, weights))
    box(ax, 3.75, 0.4, 1.6, f"$\\Sigma\\Sigma S \\; / \\; {total}$", RED)
    ax.text(3.6, 0.8, "reduced once,\ndivided once", ha="right", va="center", color=GREY)
    ax.text(4.55, 0.1, "one update", ha="center", color=GREY)
    ax.set(xlim=(-1.1, 6.1), ylim=(0, 4.4))
    ax.axis("off")
    fig.tight_layout(pad=0.2)
    return fig


def timeline() -> Figure:
    """Three groups in time: an update, a skip, and a short group at the end."""
    fig, ax = plt.subplots(figsize=(6.8, 2.1))
    x = 0.0
    groups = [(4, "update", BLUE), (4, "skip: inf", RED), (2, "update", BLUE)]
    for number, (size, outcome, color) in enumerate(groups):
        for a in range(size):
            bad = outcome != "update" and a == 1
            box(ax, x, 1, 0.72, "inf" if bad else f"m{a}", RED if bad else BLUE)
            x += 0.76
        ax.annotate("", (x + 0.1, 0.75), (x - 0.1, 1.0), arrowprops={"arrowstyle": "->"})
        ax.text(x + 0.1, 0.4, outcome, ha="center", color=color)
        label = f"group {number}" + (", short" if size < 4 else "")
        ax.text(x - 0.38 * size, 2.05, label, ha="center", color=GREY)
        x += 0.5
    ax.text(0, -0.15, "attempts: 3    updates: 2    skips: 1    schedule: 2", color=GREY)
    ax.set(xlim=(-0.1, x + 0.7), ylim=(-0.4, 2.4))
    ax.axis("off")
    return fig


def losses(rows: int, examples: int) -> np.ndarray:
    """Losses of a small regression after each update of so many rows, on the same examples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, 16)).astype(np.float32)
    y = x @ rng.normal(size=16).astype(np.float32)

    def loss_fn(w: jax.Array, batch: dict[str, jax.Array]) -> ja.Weighted:
        return ja.Weighted(jnp.sum((batch["x"] @ w - batch["y"]) ** 2), len(batch["y"]))

    tx = optax.sgd(2e-3 * rows)  # the rate grows with the batch: as many examples, as far
    step = ja.make_train_step(loss_fn, tx, 4)
    w = jnp.zeros(16)
    state, found = tx.init(w), []
    for start in range(0, examples, rows):
        part = slice(start, start + rows)
        w, state, _ = step(w, state, {"x": x[part], "y": y[part]})
        found.append(loss_fn(w, {"x": x, "y": y}).mean)
    return np.asarray(found)


def axes() -> Figure:
    """The same two runs against updates (the wrong axis) and against examples."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.8, 3.0), sharey=True)
    for rows, color in ((8, BLUE), (32, ORANGE)):
        loss = losses(rows, 1024)
        updates = np.arange(1, len(loss) + 1)
        label = f"{rows} examples per update"
        left.plot(updates, loss, color=color, label=label)
        right.plot(updates * rows, loss, color=color, label=label)
    left.set(xlabel="updates", ylabel="loss", yscale="log", xlim=(0, 40))
    left.set_title("misleading: one looks four times as fast", fontsize=9)
    right.set(xlabel="examples")
    right.set_title("comparable: they agree", fontsize=9)
    right.legend(frameon=False, loc="upper right", fontsize=9)
    fig.tight_layout()
    return fig


def memory() -> Figure:
    """Peak memory of a step against m, the examples per update staying the same."""
    width, rows = 256, 64

    def loss_fn(params: list[jax.Array], batch: jax.Array) -> ja.Weighted:
        hidden = batch
        for matrix in params:
            hidden = jnp.tanh(hidden @ matrix)
        return ja.Weighted(jnp.sum(hidden**2), hidden.size)

    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 4
    batch = jax.ShapeDtypeStruct((rows, 64, width), jnp.float32)
    tx = optax.adamw(1e-3)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    peaks = []
    for m in sizes:
        step = ja.make_train_step(loss_fn, tx, rows // m)
        analysis = ja.memory.analyze(step, params, jax.eval_shape(tx.init, params), batch)
        peaks.append(analysis.peak / 2**20)
    fig, ax = plt.subplots(figsize=(6, 3.2))
    ax.plot(sizes, peaks, "o-", color=BLUE)
    ax.axhline(peaks[-1], color=GREY, linestyle=":")
    ax.text(1, peaks[-1] * 0.97, "undivided batch", color=GREY, va="top")
    ax.set(xlabel="microbatch size m (64 examples per update)", ylabel="peak memory, MiB")
    ax.set_ylim(0)
    fig.tight_layout()
    return fig


PICTURES = {"group": group, "timeline": timeline, "axes": axes, "memory-by-m": memory}


def main(folder: Path) -> None:
    """Draws all pictures into a folder."""
    for name, draw in PICTURES.items():
        fig = draw()
        fig.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
        plt.close(fig)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)

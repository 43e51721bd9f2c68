"""The confusion matrix of the doctor over the gallery: what was there, and what it said.

    python -m tests.faults.matrix --seeds 50 --json matrix.json
    python -m tests.faults.matrix --from matrix.json --write docs/doctor.md --draw docs/_static

Every fault is diagnosed for every seed of data and parameters, in float32; every correct recipe
also in bfloat16. Exit status 1 if any answer is wrong. `pytest` asks the same of the same steps,
of a few seeds, or of as many as GALLERY_SEEDS says; GALLERY_ROWS=folder keeps what was said there:

    GALLERY_SEEDS=50 GALLERY_ROWS=rows pytest -k of_the_gallery --timeout 3600
    python -m tests.faults.matrix --from rows/*.json
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.faults import gallery

BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
RIGHT = "right"
PICTURE = "confusion.svg"


def measure(framework: str, seeds: range, *, only: str = "") -> list[dict]:
    """A row for each step and dtype, with how often each answer was given."""
    rows = []
    for faulty in (True, False):
        for name in gallery.names(framework, faulty=faulty):
            if only in name:
                rows += rows_of(framework, name, seeds)
    return rows


def rows_of(framework: str, name: str, seeds: range) -> list[dict]:
    """The rows of one step of the gallery."""
    module = gallery.load(name)
    faulty = module.FAULT is not None
    both = [np.float32, ml_dtypes.bfloat16]
    rows = []
    for dtype in [np.float32] if faulty else getattr(module, "DTYPES", both):
        said = Counter(answer(module, seed, {} if faulty else {"dtype": dtype}) for seed in seeds)
        rows.append(
            {
                "framework": framework,
                "step": name.partition(".")[2],
                "dtype": np.dtype(dtype).name,
                "truth": module.FAULT or RIGHT,
                "said": dict(said),
            }
        )
        sys.stderr.write(f"{framework} {name} {rows[-1]['dtype']}: {dict(said)}\n")
    return rows


def check(framework: str, name: str, fewest: int) -> None:
    """Asserts that the doctor says what is there, for `fewest` seeds or GALLERY_SEEDS."""
    rows = rows_of(framework, name, range(int(os.environ.get("GALLERY_SEEDS", fewest))))
    if folder := os.environ.get("GALLERY_ROWS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.json").write_text(json.dumps(rows, indent=1), "utf-8")
    assert rows
    for row in rows:
        assert set(row["said"]) == {row["truth"]}, row


def answer(module, seed: int, options: dict) -> str:
    """The name that the doctor gives, "right", "unknown", or why it refused."""
    try:
        found = gallery.examine(module, seed, **options)
    except ValueError as error:
        return f"refused: {' '.join(str(error).split())[:60]}"
    return found.fault or found.status


def table(rows: list[dict]) -> str:
    """The matrix in Markdown; columns without any count are left out of a row."""
    lines = ["| what was there | framework | dtype | step | the doctor said |", "|" + " --- |" * 5]
    for row in sorted(rows, key=lambda r: (r["truth"] == RIGHT, r["truth"], r["framework"])):
        said = ", ".join(f"{name}: {n}" for name, n in sorted(row["said"].items()))
        lines.append(
            f"| {row['truth']} | {row['framework']} | {row['dtype']} | `{row['step']}` | {said} |"
        )
    total = sum(sum(r["said"].values()) for r in rows)
    good = sum(r["said"].get(r["truth"], 0) for r in rows)
    unknown = sum(r["said"].get("unknown", 0) for r in rows)
    head = f"{good} of {total} answers right, {unknown} unknown, {total - good - unknown} wrong."
    return "\n".join([head, "", *lines])


def draw(rows: list[dict], folder: Path) -> None:
    """The matrix as a picture: what was there downwards, what was said across."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "jax-accum", "svg.fonttype": "path"})
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for said, number in row["said"].items():
            counts[row["truth"], said] += number
    truths = sorted({truth for truth, _ in counts}, key=lambda name: (name == RIGHT, name.lower()))
    others = sorted({said for _, said in counts} - {*truths, "unknown"})
    columns = [*truths, *others, "unknown"]
    share = np.zeros((len(truths), len(columns)))
    for i, truth in enumerate(truths):
        total = sum(n for (t, _), n in counts.items() if t == truth)
        for j, said in enumerate(columns):
            share[i, j] = counts[truth, said] / total
    fig, ax = plt.subplots(figsize=(9.5, 8.5))
    ax.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for (truth, said), number in counts.items():
        i, j = truths.index(truth), columns.index(said)
        light = "white" if share[i, j] > 0.5 else "#b03a48"
        ax.text(j, i, str(number), ha="center", va="center", fontsize=7, color=light)
    ax.set_xticks(
        range(len(columns)), columns, rotation=60, ha="right", rotation_mode="anchor", fontsize=8
    )
    ax.set_yticks(range(len(truths)), truths, fontsize=8)
    ax.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(len(truths) + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="#d9dce1", linewidth=0.5)
    ax.tick_params(which="both", length=0)
    ax.set(xlabel="what the doctor said", ylabel="what was there")
    ax.spines[:].set_visible(False)
    fig.savefig(folder / PICTURE, metadata={"Date": None}, bbox_inches="tight")
    plt.close(fig)


def write(path: Path, text: str) -> None:
    """Puts the table between the two marks of a page."""
    page = path.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Measures or reads, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--framework", choices=[*gallery.FOLDERS], action="append")
    parser.add_argument("--only", default="", help="a part of the name of a step")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--from", dest="read", type=Path, nargs="+", help="rows measured before")
    parser.add_argument("--write", type=Path, help="a page with the two marks")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draws confusion.svg there")
    given = parser.parse_args()
    if given.read:
        rows = [row for path in given.read for row in json.loads(path.read_text("utf-8"))]
    else:
        seeds = range(given.seeds)
        rows = [
            row
            for framework in given.framework or gallery.FOLDERS
            for row in measure(framework, seeds, only=given.only)
        ]
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1), "utf-8")
    text = table(rows)
    print(text)
    if given.write:
        write(given.write, text)
    if given.draw:
        draw(rows, given.draw)
    return int(any(set(row["said"]) != {row["truth"]} for row in rows))


if __name__ == "__main__":
    sys.exit(main())

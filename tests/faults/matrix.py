"""The confusion matrix of the doctor over the gallery: what was there, and what it said.

    python -m tests.faults.matrix --seeds 50 --json matrix.json
    python -m tests.faults.matrix --from matrix.json --write docs/doctor.md

Every fault is diagnosed for every seed of data and parameters, in float32; every correct recipe
also in bfloat16. Exit status 1 if any answer is wrong.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.faults import gallery

BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
RIGHT = "right"


def measure(framework: str, seeds: range, *, only: str = "") -> list[dict]:
    """A row for each step and dtype, with how often each answer was given."""
    rows = []
    for faulty in (True, False):
        for name in gallery.names(framework, faulty=faulty):
            if only not in name:
                continue
            module = gallery.load(name)
            dtypes = (
                [np.float32]
                if faulty
                else getattr(module, "DTYPES", [np.float32, ml_dtypes.bfloat16])
            )
            for dtype in dtypes:
                options = {} if faulty else {"dtype": dtype}
                said = Counter(answer(module, seed, options) for seed in seeds)
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
    return int(any(set(row["said"]) != {row["truth"]} for row in rows))


if __name__ == "__main__":
    sys.exit(main())

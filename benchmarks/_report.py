"""The report: JSON for machines, Markdown and one self-contained HTML page for people."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks._result import FAILS, HOLDS, NOISE, Figure, Plot, Result, Table, show

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:14px}
td,th{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}
.wide{overflow-x:auto}img{max-width:100%;height:auto}.no{color:#a40000;font-weight:600}
.yes{color:#2a6f2a}.so{color:#7a5c00}.note{color:#555}
caption{text-align:left;font-weight:600;padding:.6rem 0}
"""
HEADS = ["verdict", "claim", "measured", "limit"]


def as_json(results: list[Result], machine: dict[str, Any], limits: dict[str, float]) -> dict:
    """Everything, for `compare` and for the other two."""
    return {
        "schema": 1,
        "machine": machine,
        "limits": limits,
        "results": [dataclasses.asdict(r) for r in results],
    }


def write(
    directory: Path, results: list[Result], machine: dict[str, Any], limits: dict[str, float]
) -> Path:
    """Writes `results.json`, `report.md`, `report.html` and a PNG per plot; returns the page."""
    directory.mkdir(parents=True, exist_ok=True)
    data = as_json(results, machine, limits)
    (directory / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    pictures = {}
    for result in results:
        for i, plot in enumerate(result.plots):
            name = f"{result.name}-{i + 1}.png"
            pictures[(result.name, i)] = (name, draw(plot))
            (directory / name).write_bytes(pictures[(result.name, i)][1])
    (directory / "report.md").write_text(_markdown(results, machine, limits, pictures))
    page = directory / "report.html"
    page.write_text(_html(results, machine, limits, pictures))
    return page


def draw(plot: Plot) -> bytes:
    """A plot as PNG."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7, 4.2), dpi=110, layout="constrained")
    axes = canvas.subplots()
    for (name, points), mark in zip(plot.series.items(), "osD^vPX*<>" * 3, strict=False):
        marker = mark if len(points) < 20 else ""
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=5, label=name)
    if plot.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in plot.series.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks], fontsize=8)
        axes.minorticks_off()
    if plot.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    file = io.BytesIO()
    canvas.savefig(file, format="png")
    return file.getvalue()


def headline(results: list[Result]) -> str:
    """The outcome in a sentence."""
    verdicts = [verdict for r in results for _, _, verdict in r.verdicts()]
    if not verdicts:
        return "Nothing was claimed."
    n = {verdict: verdicts.count(verdict) for verdict in (HOLDS, NOISE, FAILS)}
    if n[HOLDS] == len(verdicts):
        return f"All {len(verdicts)} claims hold on this machine."
    parts = [f"{n[HOLDS]} of {len(verdicts)} claims hold"]
    parts += [f"{n[NOISE]} within the noise"] if n[NOISE] else []
    parts += [f"{n[FAILS]} do not"] if n[FAILS] else []
    return f"{', '.join(parts)} on this machine."


def claims_table(results: Iterable[Result]) -> Table:
    """Every claim with what was measured; those that do not hold come first."""
    rows = []
    for result in results:
        for claim, figure, verdict in result.verdicts():
            sign = "at most" if claim.at_most else "at least"
            text = claim.text + (f" ({claim.why})" if claim.why and verdict != HOLDS else "")
            rows.append([verdict, text, figure, f"{sign} {show(claim.limit)}"])
    rows.sort(key=lambda row: (FAILS, NOISE, HOLDS).index(row[0]))
    return Table("What is claimed", HEADS, rows)


def machine_lines(machine: dict[str, Any], limits: dict[str, float]) -> list[str]:
    """What it was measured on."""
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    lines = [
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, "
        f"devices: {', '.join(machine['devices'])}.",
        f"Python {machine['python']}, {versions}.",
        f"Bounds measured in this run: {limits['bytes_per_second'] / 1e9:.1f} GB/s read and "
        f"written, {limits['flops_per_second'] / 1e9:.0f} GFLOP/s in a float32 product.",
    ]
    if not any("gpu" in d or "cuda" in d for d in machine["devices"]):
        lines.append("Not measured on GPU yet.")
    return lines


def _cell(x: Any) -> str:
    return str(x) if isinstance(x, (Figure, str)) else show(x)


def _markdown(
    results: list[Result], machine: dict, limits: dict, pictures: dict[Any, tuple[str, bytes]]
) -> str:
    def table(t: Table) -> list[str]:
        lines = [f"**{t.title}**", "", f"| {' | '.join(t.columns)} |"]
        lines.append(f"|{' --- |' * len(t.columns)}")
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in t.rows]
        return [*lines, "", *([t.note, ""] if t.note else [])]

    out = ["# Benchmarks", "", headline(results), "", *machine_lines(machine, limits), ""]
    out += ["Ratios are medians over rounds in which all ways took turns, with quartiles.", ""]
    out += table(claims_table(results))
    for result in results:
        out += [f"## {result.name}", "", result.question.strip(), ""]
        for t in result.tables:
            out += table(t)
        for i, plot in enumerate(result.plots):
            out += [f"![{plot.title}]({pictures[(result.name, i)][0]})", ""]
    return "\n".join(out)


def _html(
    results: list[Result], machine: dict, limits: dict, pictures: dict[Any, tuple[str, bytes]]
) -> str:
    def table(t: Table) -> str:
        def td(x: Any) -> str:
            marks = {HOLDS: " class=yes", NOISE: " class=so", FAILS: " class=no"}
            mark = marks.get(x, "") if isinstance(x, str) else ""
            return f"<td{mark}>{html.escape(_cell(x))}</td>"

        head = "".join(f"<th>{html.escape(c)}</th>" for c in t.columns)
        body = "".join(f"<tr>{''.join(map(td, row))}</tr>" for row in t.rows)
        note = f"<p class=note>{html.escape(t.note)}</p>" if t.note else ""
        caption = f"<caption>{html.escape(t.title)}</caption>"
        return f"<div class=wide><table>{caption}<tr>{head}</tr>{body}</table></div>{note}"

    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>Benchmarks</title><style>{STYLE}</style><h1>Benchmarks</h1>",
        f"<p><strong>{html.escape(headline(results))}</strong></p>",
        "".join(
            f"<p class=note>{html.escape(line)}</p>" for line in machine_lines(machine, limits)
        ),
        "<p>Ratios are medians over rounds in which all ways took turns, with quartiles.</p>",
        table(claims_table(results)),
    ]
    for result in results:
        parts.append(
            f"<h2 id={result.name}>{result.name}</h2><p>{html.escape(result.question)}</p>"
        )
        parts += map(table, result.tables)
        for i, plot in enumerate(result.plots):
            image = base64.b64encode(pictures[(result.name, i)][1]).decode()
            alt = html.escape(f"{plot.title}: {plot.y} against {plot.x}", quote=True)
            parts.append(f'<p><img alt="{alt}" src="data:image/png;base64,{image}"></p>')
    return "\n".join(parts)

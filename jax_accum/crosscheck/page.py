"""The report page: one self-contained HTML file, readable by someone new to the subject."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from typing import Any

from jax_accum.crosscheck.data import Example
from jax_accum.crosscheck.page_text import CAPTIONS, GLOSSARY, STYLE
from jax_accum.crosscheck.plots import representatives
from jax_accum.crosscheck.run import CaseResult
from jax_accum.crosscheck.summary import Told, in_words, times

SHOWN_EXAMPLES = 8
SHOWN_PARAMETERS = 8


def render(told: Told, data: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page.

    Args:
      told: the run and its verdict.
      data: what `as_data` made of it.
      pictures: PNGs by file name; they are embedded.

    Returns:
      HTML. Everything that comes from the text, from file names or from the command line is
      escaped.
    """
    parts = [
        f'<section class="verdict {told.verdict.split()[0]}">',
        f"<h1>{_headline(told)}</h1>",
        f"<p>{escape(told.sentence)}</p>",
        *(f"<p>{escape(note)}</p>" for note in told.notes),
        "</section>",
        _what_was_done(told),
        _cases(told),
        _reductions(told),
    ]
    for name, image in pictures.items():
        parts.append(_picture(name, image))
    if told.results:
        parts += [_parameters(told), _examples(told)]
    parts += [_tolerances(data), _glossary(), _reproduce(data)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>JAX and PyTorch side by side: {escape(told.verdict)}</title>"
        f"<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _headline(told: Told) -> str:
    heads = {
        "equal": "Equal: JAX and PyTorch trained the same",
        "differ": "They differ: JAX and PyTorch did not train the same",
        "nothing compared": "Nothing was compared",
    }
    return heads[told.verdict]


def _what_was_done(told: Told) -> str:
    run = told.run
    fault = ""
    if run.fault is not None:
        fault = (
            f"<p><strong>This is a test of the check itself.</strong> In place of the "
            "library, the JAX side ran a loop written by hand with a known mistake, "
            f"<code>{escape(run.fault.name)}</code>: {escape(run.fault.meaning)}. "
            "A check that is worth something says “differ”.</p>"
        )
    return f"""<section><h2>What was done</h2>
<p>A small language model was trained twice for {run.updates} optimizer updates: in JAX with
<code>jax_accum</code>, and in PyTorch with a reference written on its own. Both started from the
same weights and read the same text ({escape(told.source)}). Each batch was cut into
<em>microbatches</em> whose gradients are added up before one update is made: gradient accumulation.
Done rightly, that must not change what is learned.</p>
<p>Computers round. So every quantity is held against a run of the whole, uncut batch in float64,
and may be four times as far from it as plain float32 is, of the uncut batch or, in the quick
cases, of microbatches put together exactly: that is the size of pure rounding. The number in the
table is the largest difference found divided by what is allowed: below 1 is rounding, above 1 is a
mistake.</p>{fault}</section>"""


def _cases(told: Told) -> str:
    rows = []
    for result in told.results:
        word = "equal" if result.equal else "differ"
        finding = result.failure or result.worst
        rows.append(
            f'<tr><td><code>{escape(result.case.name)}</code><br><span class="small">'
            f"{escape(result.case.meaning)}</span></td>"
            f'<td><span class="tag {word}">{word}</span></td>'
            f'<td class="number">{len(result.findings):,}</td>'
            f'<td class="number">{escape(_multiple(result.worst.ratio))}</td>'
            f"<td>{escape(finding.place)}</td></tr>"
        )
    where = "Where; if it differs, what left its tolerance first"
    head = _head("Case", "Verdict", "#Quantities compared", "#Worst ÷ allowed", where)
    return f"<section><h2>Cases</h2>{_table(head, rows)}</section>"


def _reductions(told: Told) -> str:
    """How often the PyTorch processes exchanged a gradient, by the count of DDP's own hook."""
    name = "gradient reductions"
    rows = []
    for result in told.results:
        counts = result.counters.get("PyTorch", {})
        if name not in counts:
            continue
        # An update that overflowed was reduced as well; a group without any label was not.
        made = counts["attempts"] - counts["skipped_empty"]
        rows.append(
            f"<tr><td><code>{escape(result.case.name)}</code></td>"
            f'<td class="number">{counts["microbatches"]}</td><td class="number">{made}</td>'
            f'<td class="number">{counts[name]}</td></tr>'
        )
    if not rows:
        return ""
    head = _head("Case", "#Microbatches", "#Groups with labels", "#Reductions")
    return (
        "<section><h2>PyTorch in two processes</h2><p>Replicas exchange their gradient once per "
        "group, however many microbatches it has: with groups and reductions the same, one per "
        f"update.</p>{_table(head, rows)}</section>"
    )


def _picture(name: str, image: bytes) -> str:
    title, caption = CAPTIONS[name]
    data = base64.b64encode(image).decode()
    return (
        f"<section><h2>{title}</h2><p>{caption}</p>"
        f'<div class="scroll"><img alt="{title}" src="data:image/png;base64,{data}"></div>'
        "</section>"
    )


def _parameters(told: Told) -> str:
    parts = [
        "<section><h2>Where the largest differences lie</h2><p>The parameters whose gradients of "
        "the first group come nearest to their tolerance, or leave it.</p>"
    ]
    for result in representatives(told.results, by=("dtype",)):
        found = sorted(result.parameters, key=lambda f: -f.ratio)[:SHOWN_PARAMETERS]
        rows = [
            f"<tr><td><code>{escape(f.parameter or '')}</code></td>"
            f'<td class="number">{f.error:.1e}</td><td class="number">{f.allowed:.1e}</td>'
            f'<td class="number">{escape(_multiple(f.ratio))}</td></tr>'
            for f in found
        ]
        head = _head("Parameter", "#JAX to PyTorch", "#Allowed", "#÷ allowed")
        parts.append(f"<h3><code>{escape(result.case.name)}</code></h3>{_table(head, rows)}")
        parts.append(_failures(result))
    return "".join(parts) + "</section>"


def _failures(result: CaseResult) -> str:
    bad = [finding for finding in result.findings if not finding.passed]
    if not bad:
        return ""
    items = "".join(f"<li>{escape(in_words(finding))}</li>" for finding in bad[:5])
    more = f"<p>and {len(bad) - 5:,} more.</p>" if len(bad) > 5 else ""
    return f"<p>What left its tolerance, in order:</p><ol>{items}</ol>{more}"


def _examples(told: Told) -> str:
    examples = told.run.examples[:SHOWN_EXAMPLES]
    rows = [
        f"<tr><td><code>{escape(example.id)}</code></td>"
        f'<td class="number">{example.targets}</td>'
        f'<td class="text"><code>{escape(_text(example))}</code></td></tr>'
        for example in examples
    ]
    head = _head("Example", "#Supervised tokens", "Text")
    return (
        f"<section><h2>The first examples</h2><p>{len(told.run.documents):,} documents give "
        f"{len(told.run.examples):,} examples. A token is a byte. Every token but the first of an "
        "example is predicted from those before it, and so supervised; examples differ in length, "
        f"which is what makes accumulation easy to get wrong.</p>{_table(head, rows)}</section>"
    )


def _tolerances(data: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(name)}</code></td>"
        f'<td class="number">{entry["value"]:.3g}</td><td>{escape(entry["reason"])}</td></tr>'
        for name, entry in data["tolerances"].items()
    ]
    head = _head("Number", "#Value", "Why")
    return f"<section><h2>Tolerances</h2>{_table(head, rows)}</section>"


def _glossary() -> str:
    items = "".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in GLOSSARY)
    return f"<section><h2>Words</h2><dl>{items}</dl></section>"


def _reproduce(data: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    where = ", ".join(f"{name}: {value}" for name, value in data["machine"].items())
    settings = data["settings"]
    return (
        "<section><h2>Again</h2><p>This command repeats the run:</p>"
        f"<pre>{escape(data['command'])}</pre>"
        f'<p class="small">{escape(packages)}. {escape(where)}. Seed {settings["seed"]}. '
        f"{escape(data['date'])}. All numbers are in <code>report.json</code> beside this page."
        "</p></section>"
    )


def _text(example: Example) -> str:
    """A window back as text; a character that the window cuts apart is shown as such."""
    return bytes(example.tokens.astype("uint8")).decode("utf-8", "replace")


def _head(*names: str) -> str:
    """A head row; names of columns of numbers begin with ``#``."""
    cells = (
        f'<th class="number">{name[1:]}</th>' if name.startswith("#") else f"<th>{name}</th>"
        for name in names
    )
    return f"<tr>{''.join(cells)}</tr>"


def _multiple(ratio: float) -> str:
    return times(ratio).removesuffix(" times")


def _table(head: str, rows: list[str]) -> str:
    body = "".join(rows)
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'

"""The fixed words and the looks of the report page."""

from __future__ import annotations

CAPTIONS = {
    "cases.png": (
        "Every case against its tolerance",
        "A dot left of the dashed line is a difference that rounding explains; a cross right of it "
        "is one that it does not.",
    ),
    "losses.png": (
        "Losses",
        "Above, the loss of both sides over each other, before each update; below, how far they "
        "are apart on a logarithmic scale, and how far rounding alone could bring them. A "
        "dot at 1e-17 stands for no difference at all. Of each optimizer and dtype, "
        "the case that came nearest to its tolerance, or went furthest past it.",
    ),
    "parameters.png": (
        "Gradients, parameter by parameter",
        "A dot is how far JAX's and PyTorch's gradient of the first group are apart, a bar what is "
        "allowed; the red dot came nearest to its bar, or went past it.",
    ),
}

GLOSSARY = (
    ("example", "one window of a text, with an ID that stays the same"),
    ("microbatch", "the examples that pass through the model together"),
    (
        "group",
        "the microbatches whose gradients are added up for one update; A is how many there are",
    ),
    ("update", "one change of the weights by the optimizer"),
    ("attempt", "a group reached its end and an update was due; a skip is one that made none"),
    ("supervised token", "a token that the model has to predict; padding is not"),
    ("ragged", "the text ends inside the last group, which is smaller than the others"),
    ("across calls", "one call of the training function per microbatch"),
    ("in one call", "one call per update, which loops over the microbatches inside"),
    (
        "undivided",
        "the whole batch at once, nothing cut: the truth that an accumulated run must reproduce",
    ),
    ("float32, float64", "numbers of about 7 and about 16 significant digits"),
)

STYLE = """
:root { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #f6f5f2; }
body { margin: 0; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem; }
section { background: #fff; border-radius: 8px; padding: 0.6rem 1.2rem 1rem; margin: 0 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.15rem; margin: 0.5rem 0; }
h3 { font-size: 1rem; margin: 1rem 0 0.3rem; overflow-wrap: anywhere; }
.verdict { border-left: 8px solid #6b6b6b; }
.verdict.equal { border-color: #2e7d4f; }
.verdict.differ { border-color: #b3261e; }
.verdict p { font-size: 1.05rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.6rem; }
th, td { border-bottom: 1px solid #e4e2dc; }
th { font-weight: 600; }
th.number, td.number { text-align: right; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { min-width: 16rem; }
td:last-child { min-width: 5rem; }
code { font-size: 0.92em; overflow-wrap: anywhere; }
td:first-child { min-width: 11rem; }
pre { background: #f0eee8; padding: 0.6rem; border-radius: 6px; white-space: pre-wrap; }
pre { overflow-wrap: anywhere; }
.small { font-size: 0.82rem; color: #555; }
.tag { border-radius: 999px; padding: 0.05rem 0.6rem; white-space: nowrap; }
.tag { color: #fff; background: #2e7d4f; }
.tag.differ { background: #b3261e; }
img { width: 100%; height: auto; min-width: 36rem; }
dt { font-weight: 600; } dd { margin: 0 0 0.4rem 1rem; }
@media (max-width: 40rem) { main { padding: 0.4rem; } section { padding: 0.5rem 0.7rem 0.8rem; } }
"""

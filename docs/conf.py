"""How Sphinx builds the documentation: `make docs`."""

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import latex2mathml.converter
from docutils import nodes

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "jax-accum"
copyright = "The jax-accum authors"
version = release = importlib.metadata.version("jax-accum")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "jupyter_execute", "**/.ipynb_checkpoints"]

# The notebooks are run while the site is built, and an error in one fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["References"]
add_module_names = False
python_maximum_signature_line_length = 72

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "jax-accum"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False

# In docstrings a single backtick marks code.
default_role = "code"


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read as they are; this makes of them what Sphinx expects.

    A single backtick marks code, and an indented block behind a colon is code.
    """
    for i, line in enumerate(lines):
        # Code in the plural: Sphinx wants a separator before the s.
        line = re.sub(r"(?<![`:])`([^`]+)`s\b", r"``\1``\\ s", line)
        after = lines[i + 2] if i + 2 < len(lines) and not lines[i + 1].strip() else ""
        indent = len(line) - len(line.lstrip())
        if line.rstrip().endswith(":") and after.startswith(" " * (indent + 1)):
            line = line.rstrip() + ":"
        lines[i] = line


def inline_math(writer: Any, node: Any) -> None:
    """Formulas as MathML: browsers show it without a script, and without a network."""
    writer.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def display_math(writer: Any, node: Any) -> None:
    """The same, on a line of its own."""
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    writer.body.append(f'<div class="formula">{formula}</div>')
    raise nodes.SkipNode


def leave_math(writer: Any, node: Any) -> None:
    """Nothing is left to do."""


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (inline_math, leave_math), (display_math, leave_math))
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon

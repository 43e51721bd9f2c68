"""How Sphinx builds the documentation: `make docs`."""

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "jax-accum"
copyright = "The jax-accum authors"
version = release = importlib.metadata.version("jax-accum")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

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

html_theme = "furo"
html_title = "jax-accum"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read as they are; this makes of them what Sphinx expects.

    A single backtick marks code, and an indented block behind a colon is code.
    """
    for i, line in enumerate(lines):
        line = re.sub(r"(?<![`:])`([^`]+)`(?![`_])", r"``\1``", line)
        after = lines[i + 2] if i + 2 < len(lines) and not lines[i + 1].strip() else ""
        indent = len(line) - len(line.lstrip())
        if line.rstrip().endswith(":") and after.startswith(" " * (indent + 1)):
            line = line.rstrip() + ":"
        lines[i] = line


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon

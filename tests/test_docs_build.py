"""The documentation builds without a warning, and the notebooks run."""

import html.parser
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
TOOLS = ("sphinx", "myst_nb", "furo")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert any("assert " in source for source in sources)
    names: dict[str, object] = {}
    for number, source in enumerate(sources):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    kept = [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert not kept, "its outputs are made while the site is built"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site; the notebooks are not run for it, that is a test of its own."""
    if any(importlib.util.find_spec(tool) is None for tool in TOOLS):
        pytest.skip("the documentation needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "--fail-on-warning", "--keep-going"]
    command += ["--quiet", "-D", "nb_execution_mode=off", "-d", str(folder / "doctrees")]
    done = subprocess.run(
        [*command, str(DOCS), str(folder / "html")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


class Links(html.parser.HTMLParser):
    """Where a page links to, and the places in it that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.places |= {named[key] for key in ("id", "name") if named.get(key)}
        self.targets += [named[key] for key in ("href", "src") if named.get(key)]


def test_links_of_the_site_lead_to_pages_and_places_in_them(site):
    pages = {path: Links(path) for path in site.rglob("*.html")}
    assert len(pages) > 20
    broken = []
    for path, links in pages.items():
        for target in links.targets:
            name, place = urldefrag(target)
            if "://" in target or (target.startswith(("mailto:", "data:", "#")) and not place):
                continue
            file = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            if not file.exists():
                broken.append(f"{path.name} links to {target}: no such file")
            elif place and file in pages and unquote(place) not in pages[file].places:
                broken.append(f"{path.name} links to {target}: no such place")
    assert broken == []


def test_every_public_name_has_an_entry_in_the_reference(site):
    import jax_accum as ja

    places = Links(site / "api.html").places
    modules = {name for name in ja.__all__ if type(getattr(ja, name)).__name__ == "module"}
    missing = [
        name
        for name in set(ja.__all__) - modules - {"__version__"}
        if f"jax_accum.{name}" not in places
    ]
    assert missing == []

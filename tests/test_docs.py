"""The documentation: blocks of code run and print what a page says, links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

import jax_accum as ja

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [page for page in PAGES if "_build" not in page.parts]
RUNNER = ROOT / "tests" / "programs" / "run_page.py"


def load_runner():
    spec = importlib.util.spec_from_file_location("run_page", RUNNER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runner = load_runner()


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def has_code(page: Path) -> bool:
    # The README's has a test of its own, which also compares its two ways.
    return page.name != "README.md" and any(runner.blocks(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", [*filter(has_code, PAGES)], ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page, run_python):
    text = page.read_text(encoding="utf-8")
    if "make_mesh((" in text:  # it needs several devices, and so a process of its own
        run_python(RUNNER, str(page), devices=8)
    else:
        assert runner.run_text(text, name_of(page)) > 0


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("```python\nprint(1)\n```\n\n```text\n2\n```\n", id="another number"),
        pytest.param("```{image} x\n```\n\n```python\n1 / 0\n```\n", id="an exception"),
        pytest.param("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", id="an assertion"),
    ],
)
def test_a_page_that_is_wrong_fails(text):
    with pytest.raises((AssertionError, ZeroDivisionError)):
        runner.run_text(text, "page.md")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_of_code_are_run_or_say_that_they_are_not_python(page):
    opened = re.findall(r"^```+([^\n`]*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    languages = set(opened[::2])  # every second fence closes
    directives = {language for language in languages if language.startswith("{")}
    assert languages - directives <= {"python", "text", "json", "toml", "console"}
    known = r"\{(toctree|image|include|literalinclude|eval-rst)\}"
    assert all(re.match(known, directive) for directive in directives)


def slug(heading: str) -> str:
    """The anchor of a heading, as MyST and GitHub make it."""
    words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return words.strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_inside_the_project_lead_to_a_file_and_a_heading(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), flags=re.MULTILINE)
            assert anchor in map(slug, headings), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_has_a_text_because_pages_are_read_as_plain_files_too(page):
    assert re.findall(r"(?<!!)\[\]\([^)]*\)", page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:examples|tests|benchmarks|scripts|jax_accum)/[\w/.]*)`", text):
        assert (ROOT / name).exists(), f"{name_of(page)} names {name}"
    shown = r"^```\{(?:image|include|literalinclude)\} (\S+)$"
    for name in re.findall(shown, text, flags=re.MULTILINE):
        assert (page.parent / name).exists(), f"{name_of(page)} shows {name}"


def test_every_page_is_in_the_table_of_contents():
    listed = set()
    for page in PAGES:
        for tree in re.findall(
            r"```\{toctree\}\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL
        ):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / name).relative_to(DOCS).as_posix() for name in names}
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.glob("**/*.md")}
    notebooks = {
        page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.glob("notebooks/*.ipynb")
    }
    assert listed == {name for name in pages | notebooks if not name.startswith("_")} - {"index"}


def test_the_reference_lists_the_public_names_and_no_others():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = set(
        re.findall(r"^\.\. auto(?:function|class|exception):: ([\w.]+)", text, re.MULTILINE)
    )
    modules = {name for name in ja.__all__ if type(getattr(ja, name)).__name__ == "module"}
    public = set(ja.__all__) - modules - {"__version__"}
    assert "jax_accum.__version__" in text
    assert {name for name in listed if not name.startswith("jax_accum.")} == public
    of_modules = {name.removeprefix("jax_accum.") for name in listed if name.startswith("jax_acc")}
    for module in modules:
        owner = getattr(ja, module)  # constants have no docstring to show
        names = {f"{module}.{name}" for name in owner.__all__ if callable(getattr(owner, name))}
        assert {name for name in of_modules if name.startswith(f"{module}.")} == names
    for name in of_modules:
        module, attribute = name.split(".")
        assert hasattr(importlib.import_module(f"jax_accum.{module}"), attribute)


def test_the_row_of_a_module_in_the_architecture_is_not_above_what_it_imports():
    rows = architecture_rows()
    for module, imported in package_imports().items():
        for other in imported:
            assert rows[other] <= rows[module], f"{module} imports {other} of a row below its own"


def test_every_module_has_a_row_in_the_architecture():
    assert set(architecture_rows()) == set(package_imports())


def architecture_rows() -> dict[str, int]:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    found: dict[str, int] = {}
    for number, modules in re.findall(r"^\| (\d+) \| ([^|]+) \|", text, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", modules):
            assert name not in found, f"{name} is in two rows"
            found[name] = int(number)
    return found


def package_imports() -> dict[str, set[str]]:
    """What each module, or package, directly in jax_accum imports of the others."""
    import ast

    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "jax_accum").rglob("*.py")):
        parts = path.relative_to(ROOT / "jax_accum").with_suffix("").parts
        if parts == ("__init__",):
            continue
        # The presets are the command line's, and what they are made of is the crosscheck's.
        name = "cli" if parts == ("memory", "_presets") else parts[0]
        mine = found.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module == "jax_accum":
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module.removeprefix("jax_accum.")] * node.module.startswith(
                    "jax_accum."
                )
            elif isinstance(node, ast.Import):
                names = [
                    a.name.removeprefix("jax_accum.") for a in node.names if "jax_accum." in a.name
                ]
            mine |= {name.split(".")[0] for name in names} - {name}
    return {module: imported & set(found) for module, imported in found.items()}


def test_the_commands_that_pages_show_exist_and_all_are_in_the_table():
    typer = pytest.importorskip("typer")
    from jax_accum.cli import make_app

    commands = set(typer.main.get_command(make_app()).commands)
    shown = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown |= set(re.findall(r"(?:^ {4}|`)jax-accum ([a-z]+)\b", text, flags=re.MULTILINE))
    assert shown <= commands
    table = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `jax-accum ([a-z]+)`", table, flags=re.MULTILINE)) == commands

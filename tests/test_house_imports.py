"""What may import what: the reference shares nothing, imports run one way, privates stay in."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax_accum", "torch_ref")


def module_name(path: Path) -> str:
    """The dotted name: jax_accum/_weighted.py is jax_accum._weighted."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path.read_text(encoding="utf-8")
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(module: str, source: str) -> list[tuple[str, str, str]]:
    """Every import of a module, as (from, name, bound to); the name is "" for a plain import."""
    found = []
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "", alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(base, alias.name, alias.asname or alias.name) for alias in node.names]
    return found


def imported_modules(module: str, source: str) -> set[str]:
    """The modules that an import names, submodules that are imported as names included."""
    return {
        f"{base}.{name}" if f"{base}.{name}" in SOURCES else base
        for base, name, _ in imports(module, source)
    }


def private_uses(module: str, source: str) -> list[str]:
    """Names beginning with an underscore that are taken from another module of the project."""
    found, aliases = [], set()
    for base, name, bound in imports(module, source):
        if base.partition(".")[0] not in PACKAGES:
            continue
        if not name or f"{base}.{name}" in SOURCES:
            aliases.add(bound)
        elif name.startswith("_") and not name.startswith("__"):
            found.append(f"{base}.{name}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = ast.unparse(node.value)
            target = f"{owner}.{node.attr}"
            if owner in aliases and not node.attr.startswith("__") and target not in SOURCES:
                found.append(target)
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_reference_and_package_share_nothing_outside_the_crosscheck(module):
    others = {name.partition(".")[0] for name in imported_modules(module, SOURCES[module])}
    if module.startswith("torch_ref"):
        assert not others & {"flax", "jax", "jax_accum", "optax"}
    elif not module.startswith("jax_accum.crosscheck"):
        assert not others & {"torch_ref"}


@pytest.mark.parametrize("module", SOURCES)
def test_no_module_uses_the_private_names_of_another(module):
    assert private_uses(module, SOURCES[module]) == []


def test_no_module_imports_itself_by_a_detour():
    graph = {
        module: (imported_modules(module, source) & SOURCES.keys()) - {module}
        for module, source in SOURCES.items()
    }
    assert any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from jax_accum.losses import _shift", ["jax_accum.losses._shift"]),
        ("from .losses import _shift", ["jax_accum.losses._shift"]),
        ("from . import losses\nlosses._shift(1)", ["losses._shift"]),
        ("import jax_accum as ja\nja._shift(1)", ["ja._shift"]),
        ("import jax_accum.losses\njax_accum.losses._shift", ["jax_accum.losses._shift"]),
        ("from jax_accum import _weighted\n_weighted.Weighted", []),
        ("import jax\njax._src", []),
        ("from jax_accum.losses import __doc__", []),
    ],
)
def test_a_planted_use_of_a_private_name_is_found(source, found, monkeypatch):
    for module in ("jax_accum.losses", "jax_accum._weighted"):
        monkeypatch.setitem(SOURCES, module, "")
    assert private_uses("jax_accum.cli", source) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def late():\n    from torch_ref import losses", {"torch_ref.losses"}),
        ("import torch_ref.losses as theirs", {"torch_ref.losses"}),
        ("from .gpt import GPT", {"jax_accum.crosscheck.gpt"}),
        ("from .. import losses", {"jax_accum.losses"}),
        ("from ..losses import softmax_cross_entropy", {"jax_accum.losses"}),
        ("import numpy as np", {"numpy"}),
    ],
)
def test_an_import_is_resolved_to_its_module(source, found, monkeypatch):
    for module in ("jax_accum.losses", "torch_ref.losses"):
        monkeypatch.setitem(SOURCES, module, "")
    assert imported_modules("jax_accum.crosscheck.run", source) == found

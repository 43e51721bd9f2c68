"""The gallery: every fault, and every correct recipe, by framework."""

import importlib
import importlib.util
from pathlib import Path

import jax_accum as ja  # noqa: F401 (before the faults, which use it)
from jax_accum.doctor import diagnose

HERE = Path(__file__).parent
FOLDERS = {"JAX": ("in_jax", "right_in_jax"), "PyTorch": ("in_torch", "right_in_torch")}


def names(framework: str, *, faulty: bool) -> list[str]:
    """Modules of the gallery, as `folder.name`."""
    folder = FOLDERS[framework][0 if faulty else 1]
    return [f"{folder}.{p.stem}" for p in sorted((HERE / folder).glob("*.py"))]


def load(name: str):
    """One module of the gallery; it has FAULT, case(seed), and update or grad."""
    return importlib.import_module(f"tests.faults.{name}")


def examine(module, seed, **options):
    """The diagnosis of one step of the gallery."""
    case = module.case(seed, **options)
    if hasattr(module, "grad"):
        return diagnose(grad=module.grad, case=case)
    return diagnose(module.update, case)

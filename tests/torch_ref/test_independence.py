"""The reference stands alone: PyTorch, NumPy and the standard library, and nothing of JAX."""

import ast
import sys
from pathlib import Path

import pytest

import torch_ref

MODULES = sorted(Path(torch_ref.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_module_of_the_reference_imports_nothing_but_pytorch_and_numpy(module: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    assert imported <= {"numpy", "torch", "torch_ref", *sys.stdlib_module_names}

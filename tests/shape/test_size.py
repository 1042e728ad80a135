"""Files and functions stay small enough to be read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent
LONGEST_FILE = 1000
LONGEST_FUNCTION = 50


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.name)
def test_sizes(path: Path) -> None:
    """Past these it wants splitting."""
    text = path.read_text()
    assert text.count("\n") <= LONGEST_FILE, path
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno
            assert length <= LONGEST_FUNCTION, f"{path.name}: {node.name} has {length} lines"

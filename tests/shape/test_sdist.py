"""The source distribution has what its own tests need."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INCLUDED = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def words(path: Path) -> Iterator[str]:
    """Every text in a module, and the first part of every module that it imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


def test_every_folder_that_tests_use_is_included() -> None:
    """Packagers run the tests from it: a folder that a test names or imports must be there."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
    named = {word for path in (ROOT / "tests").rglob("*.py") for word in words(path)}
    used = {"src", "tests"} | (folders & named)
    assert {"docs", "examples", "benchmarks"} <= used
    assert used <= {entry.removeprefix("/") for entry in INCLUDED}


def test_every_folder_that_is_included_exists() -> None:
    for entry in INCLUDED:
        assert list(ROOT.glob(entry.removeprefix("/"))), entry

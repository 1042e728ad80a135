"""Integrations are small, use the public API only, and are imported by nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.integrations import missing_extra

SOURCE = Path(holdfast.__file__).parent
FOLDER = SOURCE / "integrations"
PROJECT = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
MODULES = sorted(FOLDER.rglob("*.py"))
PUBLIC = re.compile(r"holdfast(\.cli|\.(errors|fencing|sql|testing|integrations|observe)(\.\w+)*)?")
"""``holdfast.cli`` itself is the program ``holdfast``."""
DOCUMENTED = {"_meta", "_state"}
"""Attributes of Django's models: its reference has them, whatever they look like."""
LONGEST = 300


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of Holdfast that a module imports, and what it takes of ``holdfast`` itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module == "holdfast":
            names = (alias.name for alias in node.names)
            yield from (n for n in (f"holdfast.{name}" for name in names) if not _exported(n))
        elif isinstance(node, ast.ImportFrom) and _ours(node.module or ""):
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides what it imports"


def _ours(module: str) -> bool:
    return module.partition(".")[0] == "holdfast"


def _exported(name: str) -> bool:
    return name.removeprefix("holdfast.") in holdfast.__all__


def private(tree: ast.AST) -> Iterator[str]:
    """Private attributes of objects that are not the module's own."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr in DOCUMENTED:
            continue
        if re.match(r"_[a-z]", node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own:
                yield f"{ast.unparse(node)} in line {node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_integrations_use_the_public_api_only(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert [module for module in imported(tree) if not PUBLIC.fullmatch(module)] == []
    assert list(private(tree)) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_integrations_are_short(path: Path) -> None:
    assert path.read_text().count("\n") < LONGEST


def test_nothing_imports_an_integration() -> None:
    """Neither the package nor a client loads them, or a framework."""
    code = (
        "import sys, holdfast\n"
        "for name in holdfast.__all__: getattr(holdfast, name)\n"
        "with holdfast.connect('memory://') as locks, locks.lock('a'): pass\n"
        "print([m for m in sys.modules if 'integrations' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for path in SOURCE.rglob("*.py"):
        if not path.is_relative_to(FOLDER) and not path.is_relative_to(SOURCE / "cli"):
            assert "holdfast.integrations" not in path.read_text(), path


def test_extras_that_errors_name_exist() -> None:
    """A missing framework is told with a command that works."""
    named = {
        extra
        for path in MODULES
        for extra in re.findall(r'missing_extra\(error, "(\w+)"\)', path.read_text())
    }
    assert named <= EXTRAS.keys()


def test_a_missing_extra_is_named_with_its_command() -> None:
    error = missing_extra(ModuleNotFoundError("no", name="celery"), "celery")
    assert "'celery': pip install 'holdfast[celery]'" in str(error)
    assert error.name == "celery"

"""The field's own words are used; the private ones that they replaced do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent
WORDS = {
    # a private word: what to say instead
    r"doors?|doorway|doorbells?": "client; Engine for what is behind it; WakeupHub",
    r"keepers?": "renewer",
    r"bells?|rung": "subscription; woken",
    r"debts?|owe[sd]?|forgiven?": "pending deletes or requests; add, cancel, retry",
    r"bury|buried": "delete an orphan",
    r"excuses?": "ReasonLog",
    r"nursery": "fork server",
    r"doomed": "unknown",
    r"heirs?": "next waiter",
    r"deaf": "polling",
    r"whoever|somebody": "name the subject: the holder, the waiter, another client, a process",
    r"anew": "again",
    r"of whom|to whom": "name the subject",
}
OTHERS = re.compile(r"(?i)zookeeper|keeperstate")
"""Names of other projects."""
QUOTED = re.compile(r"``[^`]*``|(?m:^ {4}.*$)")
"""Code and drawings in module docstrings: stored names keep their spelling."""


def names_and_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Names that a module defines or uses, its docstrings and its comments, by line.

    Other texts are left out: statements, keys and protocol words keep their spelling."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)
    for number, line in enumerate(text.split("\n"), 1):
        _, mark, comment = line.partition("  # ")
        if line.lstrip().startswith("# "):
            yield number, line
        elif mark:
            yield number, comment


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_private_words_do_not_come_back(path: Path) -> None:
    found = []
    for line, text in names_and_prose(path):
        words = re.sub(r"([a-z])([A-Z])", r"\1 \2", OTHERS.sub("", QUOTED.sub("", text)))
        words = words.replace("_", " ").lower()
        for word, instead in WORDS.items():
            if re.search(rf"\b(?:{word})\b", words):
                found.append(f"{line}: {text[:60]!r}: say {instead}")
    assert found == []

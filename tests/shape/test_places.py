"""The places that a store touches are those that the guide lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.url import BACKENDS

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "write-a-store.md"
FOLDERS = ("src", "tests", "docs", "benchmarks", "scripts", "examples")
HISTORY = {"CHANGELOG.md"}
"""Files that tell of every store and need no edit for a new one."""
ALONE = {"memory", "sqlite", "redlock"}
"""Stores without a server of their own, which have fewer places."""
PLACEHOLDER = "<store>"


def stores() -> set[str]:
    """The stores with a server of their own, by the names of their folders."""
    return {module.rpartition(".")[2] for module, _ in BACKENDS.values()} - ALONE


def files() -> Iterator[Path]:
    """Every text file of the project, relative to its root."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    for folder in FOLDERS:
        found += (ROOT / folder).rglob("*")
    for path in found:
        ignored = "__pycache__" in path.parts or path.suffix in (".svg", ".png", ".pyc")
        if path.is_file() and not ignored:
            yield path.relative_to(ROOT)


def named_after_a_store(paths: list[Path]) -> set[str]:
    """Paths that every store has under its own name, with the name as a placeholder."""
    patterns: dict[str, set[str]] = {}
    for path in paths:
        for number, part in enumerate(path.parts):
            stem, dot, suffix = part.partition(".")
            if stem in stores():
                pattern = "/".join([*path.parts[:number], PLACEHOLDER + dot + suffix])
                patterns.setdefault(pattern, set()).add(stem)
    return {pattern for pattern, found in patterns.items() if found == stores()}


def that_name_every_store(paths: list[Path]) -> set[str]:
    """Files outside the stores' own folders that mention every one of them."""
    words = [re.compile(rf"(?i)\b{store}(?:ql)?\b") for store in stores()]
    found = set()
    for path in paths:
        if path.as_posix() not in HISTORY:
            text = (ROOT / path).read_text()
            if all(word.search(text) for word in words):
                found.add(path.as_posix())
    return found


def test_the_guide_lists_every_place() -> None:
    """A new store that follows the guide is complete, and the guide names nothing that is gone."""
    table = re.findall(r"(?m)^\|.*\| (`.*`) \|$", GUIDE.read_text().partition("## The folder")[0])
    listed = {place for row in table for place in re.findall(r"`([^`]+)`", row)}
    paths = list(files())
    places = named_after_a_store(paths) | that_name_every_store(paths)
    assert listed == places - {GUIDE.relative_to(ROOT).as_posix()}

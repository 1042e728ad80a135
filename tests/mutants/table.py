"""The table of mutants: one TOML file per area, one row per rule that is taken out.

A row has a ``name``, the ``file`` that it changes, the ``old`` text, which stands there exactly
once, the ``new`` text, and the ``tests`` that must fail then: pytest's arguments, a string for each
call. ``make mutants`` runs them. A row whose old text is gone fails too: who moves or rewrites a
rule takes its mutant along.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

__all__ = ["HERE", "ROOT", "Mutant", "mutants"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Mutant(NamedTuple):
    """One rule taken out."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self) -> str:
        """The text of the file without the rule; raises ``ValueError`` if the rule is not there."""
        text = (ROOT / self.file).read_text()
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its old text stands {count} times in {self.file}")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All rows, in the order of their files."""
    found = []
    for path in sorted(HERE.glob("*.toml")):
        for row in tomllib.loads(path.read_text()).get("mutant", []):
            tests = tuple(row.pop("tests"))
            found.append(Mutant(**row, tests=tests))
    return found

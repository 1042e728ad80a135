"""Every row of the table of mutants still fits the code."""

from __future__ import annotations

import shlex
from collections import Counter

import pytest

from mutants.table import ROOT, Mutant, mutants


def test_names_are_unique() -> None:
    counts = Counter(mutant.name for mutant in mutants())
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_a_row_fits_the_code(mutant: Mutant) -> None:
    assert mutant.applied() != (ROOT / mutant.file).read_text()
    assert mutant.tests
    for words in mutant.tests:
        paths = [word.partition("::")[0] for word in shlex.split(words) if word[:6] == "tests/"]
        assert paths, words
        assert [path for path in paths if not (ROOT / path).exists()] == []

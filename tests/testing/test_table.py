"""Every store of the table has its harness, and every harness is held to a row."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harnesses import harness_classes
from holdfast.testing import GUARANTEES, Harness
from holdfast.testing.guarantees import (
    KNOBS,
    expected_guarantees,
    expected_knobs,
    guarantees_of,
)


@pytest.fixture(autouse=True)
def every_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a run for some stores alone."""
    monkeypatch.delenv("HOLDFAST_STORES", raising=False)


def test_every_row_has_a_harness_of_its_own() -> None:
    first = {name for name, kind in harness_classes().items() if not kind.repeats}
    assert first == set(GUARANTEES) == set(KNOBS)


def test_what_is_repeated_is_a_row() -> None:
    assert {kind.repeats for kind in harness_classes().values()} - {""} <= set(GUARANTEES)


@pytest.mark.parametrize("row", ["memory", "mysql-advisory", "etcd"])
def test_other_servers_of_a_store_are_held_to_its_row(row: str) -> None:
    class OtherHarness(Harness):
        name = "other"
        repeats = row
        url = "memory://other"

    harness = OtherHarness()
    assert expected_guarantees(harness, frozenset()) == GUARANTEES[row]
    assert guarantees_of(harness) == GUARANTEES[row]
    assert expected_knobs(harness) == KNOBS[row]


def test_other_servers_are_for_the_slow_tests(pytestconfig: pytest.Config) -> None:
    """What a store itself has shown is enough for the quick ones."""
    words = ["-p", "no:cacheprovider", "-q", "--collect-only", "-m", "not faults"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", *words, "tests/contract"],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    for name, kind in harness_classes().items():
        assert (f"[{name}-blocking-" in found.stdout) == (not kind.repeats), name

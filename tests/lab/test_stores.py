"""The comparison of stores is what the guarantees, the benchmarks and the guide say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.contract import Guarantee
from holdfast.lab.stores import STORES, StoreFacts, markdown
from holdfast.testing.guarantees import GUARANTEES

DOCS = Path(__file__).parents[2] / "docs"

SECTIONS = {
    "memory": "One process",
    "sqlite": "One machine: SQLite and lock files",
    "redis": "Redis",
    "zookeeper": "ZooKeeper",
    "etcd": "etcd",
    "consul": "Consul",
    "postgres": "PostgreSQL",
    "mysql": "MariaDB",
}


def measured(case: str, facts: StoreFacts, column: str) -> float:
    """A figure of the blocking client in docs/benchmarks.md."""
    text = (DOCS / "benchmarks.md").read_text()
    store, _, advisory = facts.store.partition("-")
    part = text.split(f"\n## {case}\n", 1)[1].split("\n## ", 1)[0]
    table = part.split(f"### {SECTIONS[store]}\n", 1)[1].split("###", 1)[0]
    head, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    name = f"**Holdfast{' advisory' if advisory else ''}**"
    (row,) = [row for row in rows if row[0] == name]
    return float(row[head.index(column)].replace(",", ""))


def test_every_store_has_a_row() -> None:
    assert {facts.store for facts in STORES} == set(GUARANTEES)


@pytest.mark.parametrize("facts", STORES, ids=lambda facts: facts.store)
def test_the_figures_are_those_of_the_benchmarks(facts: StoreFacts) -> None:
    if facts.store == "redlock":
        page = (DOCS / "benchmarks.md").read_text()
        found = re.search(r"\*\*Holdfast\*\* \| all up \| ([\d.]+) (?:\|[^|]+){2}\| ([\d.]+)", page)
        assert found is not None
        assert facts.hold_ms == pytest.approx(float(found[1]) + float(found[2]))
        return
    p50 = measured("One process, nobody else", facts, "p50 µs")
    assert facts.hold_ms == pytest.approx(p50 / 1000, rel=0.02)
    if facts.store != "memory":
        rate = measured("16 processes on one lock", facts, "holds/s")
        assert facts.holds_per_second == rate


def test_the_guide_has_the_table() -> None:
    assert markdown() in (DOCS / "guides" / "choose-a-store.md").read_text()


def test_the_readme_says_the_same() -> None:
    """What ends a hold, which losses a store survives, and whether hosts share it."""
    page = (DOCS.parent / "README.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| `[a-z]+", line)]
    assert len(rows) == len(STORES)
    for facts, line in zip(STORES, rows, strict=True):
        _, _, _, ends, order, survives, cross, _, once, _ = map(str.strip, line.split("|"))
        assert ends == facts.ends_with, line
        assert (survives == "a minority") is (facts.survives == "a minority"), line
        assert (cross == "yes") is (Guarantee.CROSS_HOST in facts.guarantees), line
        assert (once == "yes") is (facts.records == "yes"), line
        assert (order == "in order") is (facts.order == "by arrival"), line


def test_the_command() -> None:
    command = [sys.executable, "-m", "holdfast", "stores"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows, _, explanation = table.partition("\n\n")
    heads, *lines = rows.splitlines()
    assert len(lines) == len(STORES)
    words = " ".join(explanation.split())  # also in a pipe
    for head in ("ORDER", "ENDS WITH", "MAY FAIL", "FREE LOCK", "16 PROCESSES"):
        assert head in heads
        assert f"{head}: " in words
    printed = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    rows = json.loads(printed.stdout)
    assert [row["store"] for row in rows] == [facts.store for facts in STORES]
    assert "SURVIVES_SERVER_LOSS" in rows[5]["guarantees"]

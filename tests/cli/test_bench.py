"""``holdfast bench``: the same cases on a user's own store, and nothing left behind."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import bench, main


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["bench", *arguments, "--quick", "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.faults
def test_every_case_runs_and_cleans_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both clients have a row in each case, and nobody holds or waits afterwards."""
    url = f"sqlite://{tmp_path}/locks.db"
    with holdfast.connect(url) as locks, locks.lock("production"):
        answer = measured(capsys, url)
        cases = answer["cases"]
        assert isinstance(cases, dict)
        assert list(cases) == ["uncontended", "two", "sixteen", "several", "drain", "held"]
        for rows in cases.values():
            assert [row["contender"] for row in rows] == ["Holdfast", "Holdfast asyncio"]
            assert all("error" not in row for row in rows)
        assert all(row["overlaps"] == 0 for row in cases["sixteen"])
        assert all(row["served"] == row["waiters"] for row in cases["drain"])
        assert answer["left_behind"] == []
        assert [info.name for info in locks.list()] == ["production"]
    with holdfast.connect(url, namespace=str(answer["namespace"])) as locks:
        assert locks.list() == []


def test_names_stay_in_a_namespace_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it writes can be told from what production wrote."""
    file = tmp_path / "locks.db"
    namespace = measured(capsys, f"sqlite://{file}", "--case", "uncontended")["namespace"]
    with sqlite3.connect(file) as connection:
        dump = "\n".join(connection.iterdump())
    connection.close()
    assert "benchmark" in dump
    assert str(namespace) in dump


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each client under a title."""
    url = f"sqlite://{tmp_path}/locks.db"
    assert main(["bench", url, "--quick", "--case", "uncontended"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "One process, nobody else"
    assert [line.split("  ")[0] for line in lines[-2:]] == ["Holdfast", "Holdfast asyncio"]


def test_a_store_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    """It says so at once, before anything is measured."""
    assert main(["bench", "redis://127.0.0.1:1/0", "--quick"]) == 69
    assert capfd.readouterr().err.startswith("holdfast:")


def test_a_case_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    """Wrong usage, in one line."""
    assert main(["bench", "memory://x", "--case", "nonsense"]) == 64
    assert "uncontended" in capfd.readouterr().err


def test_a_terminal_is_told_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(bench, "is_terminal", lambda fd: fd == 2)
    monkeypatch.setattr(bench, "say", said.append)
    bench._greet("memory://bench", "holdfast-bench-1")
    assert "holdfast-bench-1" in said[0]
    assert "counters of a few hundred names stay there" in said[1]

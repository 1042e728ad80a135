"""A command that ends leaves SQLite's log where it is; the next reads it, as after a crash."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from cli.processes import Cli
from holdfast.io import lifetime
from holdfast.stores.sqlite import connection as wire


def token(cli: Cli, *options: str) -> int:
    result = cli("run", "x", *options, "--", "sh", "-c", "echo $HOLDFAST_TOKEN")
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_the_next_command_goes_on_from_it(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "locks.db-wal"
    first = token(cli)
    left = log.stat().st_size
    assert left > 0
    assert token(cli) > first
    assert log.stat().st_size > left  # neither copied nor started anew
    assert cli.listed() == []  # the second has read what the first released


def test_a_long_log_is_copied_into_the_file(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "locks.db-wal"
    before = token(cli)
    assert log.exists()
    with sqlite3.connect(tmp_path / "locks.db", isolation_level=None) as connection:
        connection.execute("PRAGMA wal_autocheckpoint=0")
        for number in range(wire.LONGEST_LEFT_BYTES // 2048):  # each writes one page at least
            connection.execute("UPDATE meta SET hand = ?", (str(number),))
    keeps_the_log = cli.hold("y")  # whoever has the file open keeps others from copying the log
    connection.close()
    cli.let_go(keeps_the_log)
    assert not log.exists()
    assert token(cli) > before


def test_a_log_without_its_file_is_no_log(cli: Cli, tmp_path: Path) -> None:
    token(cli)
    (tmp_path / "locks.db").unlink()
    assert (tmp_path / "locks.db-wal").exists()
    token(cli)
    with sqlite3.connect(tmp_path / "locks.db") as connection:
        assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    connection.close()


def test_a_program_that_goes_on_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    import holdfast

    with holdfast.connect(f"sqlite:///{tmp_path}/locks.db") as locks, locks.lock("x"):
        pass
    assert not (tmp_path / "locks.db-wal").exists()


def test_a_forked_child_has_not_said_that_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_leaving", True)
    lifetime._forked()
    assert not lifetime.leaving()

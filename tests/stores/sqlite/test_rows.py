"""Rows that nobody of ours wrote: every request says so, and no other name is touched by it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Waiting
from holdfast.core.drive import run_now
from holdfast.errors import Incompatible, LimitMismatch
from holdfast.io.clock import now
from holdfast.stores.sqlite.backend import SqliteBackend
from holdfast.stores.sqlite.wakeups import LONGEST_KEY_BYTES, Delivery, SocketFolder
from stores.sqlite.helpers import backend_of, claim, take, try_to_take

VALUES = (
    "'x'",
    "''",
    "x'fffe'",
    "CAST(x'fffe' AS TEXT)",
    "9223372036854775807",
    "-1",
    "1.5",
    "9e999",
    "-9e999",
    "1e300",
    "replace(hex(zeroblob(50000)), '00', '[')",
    "'1,2,x'",
    "'9,99999999999'",
    "'\u0661,\u0662'",
)
NAME = ("token", "owner", "label", "since", "ends", "crowd")
CLAIM = (
    "place", "owner", "mode", "weight", "capacity", "token", "slots", "label", "since", "ends",
    "reserved", "address", "behind",
)  # fmt: skip
COLUMNS = [*(f"name.{column}" for column in NAME), *(f"claim.{column}" for column in CLAIM)]


def asked_of(mode: Mode, owner: str = "") -> Claim:
    weight, limit = (2, 3) if mode is Mode.SLOTS else (1, 0)
    made = claim("hurt", mode, weight, limit)
    return made._replace(owner=owner) if owner else made


def requests(backend: SqliteBackend, held: Grant, waits: Claim) -> list[Callable[[], object]]:
    mode = held.claim.mode
    return [
        lambda: run_now(backend.look("hurt")),
        lambda: try_to_take(backend, asked_of(mode), join=False),
        lambda: try_to_take(backend, asked_of(mode)),
        lambda: try_to_take(backend, waits),
        lambda: try_to_take(backend, held.claim),
        lambda: run_now(backend.renew([held], [Waiting(waits, 1)], until=now() + 5)),
        lambda: run_now(backend.release(held)),
        lambda: try_to_take(backend, waits),
        lambda: run_now(backend.abandon(waits)),
        lambda: run_now(backend.revoke("hurt")),
        lambda: try_to_take(backend, asked_of(Mode.SHARED)),
    ]


def connection_of(backend: SqliteBackend) -> sqlite3.Connection:
    connection = backend._connection._database
    assert connection is not None
    return connection


def hurt(backend: SqliteBackend, column: str, value: str) -> None:
    table, _, field = column.partition(".")
    connection = connection_of(backend)
    with suppress(sqlite3.IntegrityError):  # two rows with one key
        connection.execute(f"UPDATE {table} SET {field} = {value} WHERE name LIKE '%hurt'")


def every_wound(backend: SqliteBackend, column: str) -> Iterator[tuple[Grant, Claim]]:
    """A name with a hold and a waiter, with one value replaced; again and again."""
    for mode in Mode:
        for value in VALUES:
            for table in ("name", "claim"):
                connection_of(backend).execute(f"DELETE FROM {table} WHERE name LIKE '%hurt'")
            backend._contended.clear()
            held, waits = take(backend, asked_of(mode)), asked_of(mode)
            if mode is Mode.SHARED:
                waits = asked_of(Mode.EXCLUSIVE)
            try_to_take(backend, waits)
            hurt(backend, column, value)
            yield held, waits


def refusal_of(request: Callable[[], object]) -> str:
    """The message of ``Incompatible`` if the work raises it; any other error fails the test."""
    try:
        request()
    except (Incompatible, LimitMismatch) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("column", COLUMNS)
def test_with_any_value_in_a_row_a_request_answers_or_raises_incompatible(
    tmp_path: Path, column: str
) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        healthy = take(backend, claim("healthy"))
        for held, waits in every_wound(backend, column):
            for request in requests(backend, held, waits):
                message = refusal_of(request)
                assert not message or (
                    "'hurt'" in message and str(tmp_path) in message and len(message) < 1000
                )
                page = run_now(backend.survey("", None, 10))
                assert "healthy" in [info.name for info in page.infos]
        assert not run_now(backend.renew([healthy], [], until=now() + 5)).lost


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("name.since", "1e300"),
        ("name.since", "9e999"),
        ("name.since", "'x'"),
        ("name.ends", "9e999"),
        ("name.ends", "'x'"),
        ("name.token", "'x'"),
        ("name.token", "-1"),
        ("claim.mode", "'x'"),
        ("claim.behind", "'x'"),
        ("claim.since", "9e999"),
        ("claim.ends", "x'00'"),
    ],
)
def test_an_unreadable_value_is_reported_with_its_name(
    tmp_path: Path, column: str, value: str
) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        take(backend, claim("healthy"))
        take(backend, asked_of(Mode.EXCLUSIVE))
        try_to_take(backend, asked_of(Mode.EXCLUSIVE))
        hurt(backend, column, value)
        with pytest.raises(Incompatible, match=r"'hurt' on sqlite:///.* can't be read"):
            run_now(backend.look("hurt"))
        healthy, broken = run_now(backend.survey("", None, 10)).infos
        assert (healthy.name, len(healthy.holders), healthy.notice) == ("healthy", 1, "")
        assert (broken.name, broken.holders, broken.waiters) == ("hurt", (), ())
        assert "can't be read: its" in broken.notice


def test_a_damaged_row_does_not_keep_others_from_being_renewed(tmp_path: Path) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        healthy = take(backend, claim("healthy"))
        take(backend, asked_of(Mode.EXCLUSIVE))
        waits = asked_of(Mode.EXCLUSIVE)
        try_to_take(backend, waits)
        hurt(backend, "claim.place", "'x'")
        renewal = run_now(backend.renew([healthy], [Waiting(waits, 0)], until=now() + 5))
        assert not renewal.lost
        assert renewal.forgotten == {waits.owner}


@pytest.mark.parametrize("token", ["9223372036854775807", "'x'", "-1"])
def test_no_token_follows_one_that_is_damaged(tmp_path: Path, token: str) -> None:
    """Neither by the fast path, which reads no row, nor by a transaction."""
    with backend_of(tmp_path / "locks.db") as backend:
        for mode in Mode:
            assert run_now(backend.release(take(backend, asked_of(Mode.EXCLUSIVE))))
            hurt(backend, "name.token", token)
            if (token, mode) == ("-1", Mode.EXCLUSIVE):
                continue  # any token is above it
            with pytest.raises(Incompatible, match="its last token is"):
                try_to_take(backend, asked_of(mode))
            connection_of(backend).execute("DELETE FROM name")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_invalid_name_does_not_end_a_survey(tmp_path: Path, size: int) -> None:
    """Not in UTF-8, with control characters, too long, not a text: with pages of any size."""
    with backend_of(tmp_path / "locks.db") as backend:
        for name in ("a", "c"):
            take(backend, claim(name))
        connection = connection_of(backend)
        for odd in ("CAST(x'62fffe' AS TEXT)", "'b' || char(27, 10)", "'b' || hex(zeroblob(999))"):
            connection.execute(
                "INSERT INTO name SELECT 'holdfast' || char(31) || " + odd + ", token, owner, "
                "label, since, ends, crowd FROM name WHERE name LIKE '%a'"
            )
        connection.execute(
            "INSERT INTO name SELECT CAST(name AS BLOB), token, owner, label, since, ends, crowd "
            "FROM name WHERE name LIKE '%a'"
        )
        found, cursor, pages = [], None, 0
        while cursor is not None or not pages:
            page = run_now(backend.survey("", cursor, size))
            found += page.infos
            cursor, pages = page.cursor, pages + 1
            assert pages < 20
        assert [one.name for one in found if not one.notice] == ["a", "c"]
        odd_names = [one.name for one in found if one.notice]
        assert len(odd_names) == 3
        assert "b\\xff\\xfe" in odd_names
        assert max(map(len, odd_names)) < 100


def test_a_record_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        held = take(backend, claim("hurt"))
        assert run_now(backend.record(held, "done", 3600))
        for change in ("value = CAST(x'ff' AS TEXT)", "value = 5, token = 'x'", "written = 9e999"):
            connection_of(backend).execute(f"UPDATE record SET {change}")
            with pytest.raises(Incompatible, match="'hurt'"):
                run_now(backend.recall("hurt"))
            assert run_now(backend.record(held, "done", 3600))
        record = run_now(backend.recall("hurt"))
        assert record is not None
        assert record.value == "done"


@pytest.mark.parametrize("column", ["boot", "host", "clock", "floor", "high"])
def test_marks_that_cannot_be_read_are_refused(tmp_path: Path, column: str) -> None:
    path = tmp_path / "locks.db"
    for value in ("x'ff'", "9223372036854775807", "-1", "9e999", "'x'"):
        if (column, value) in {("boot", "'x'"), ("host", "'x'")}:
            continue  # a valid value
        path.unlink(missing_ok=True)
        with backend_of(path) as backend:
            run_now(backend.look("name"))
            connection_of(backend).execute(f"UPDATE meta SET {column} = {value}")
            stored = connection_of(backend).execute(f"SELECT typeof({column}) FROM meta").fetchone()
        if column in ("boot", "host") and stored == ("text",):
            continue
        with backend_of(path) as backend, pytest.raises(Incompatible, match="marks"):
            take(backend)


def test_marks_that_are_damaged_while_the_file_is_open_are_reported(tmp_path: Path) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        run_now(backend.look("name"))
        for statement in ("UPDATE meta SET high = x'ff'", "DELETE FROM meta"):
            connection_of(backend).execute(statement)
            backend._high = 1
            with pytest.raises(Incompatible, match="marks"):
                take(backend, claim(statement))
            backend.maintain()


def test_datagrams_of_other_software_are_dropped(tmp_path: Path) -> None:
    folder = SocketFolder(str(tmp_path), lambda path: None, 0o600)
    subscription = folder.bind()
    try:
        for key in ("x" * (LONGEST_KEY_BYTES + 1), "x" * 100_000, "key"):
            assert folder.send(subscription.address, key) is Delivery.SENT
        with folder.reach(subscription.address) as path:
            folder._sender().sendto(b"\xff", path)
        assert subscription.read() == ["key", "\ufffd"]
    finally:
        subscription.close()
        folder.close()

"""What is peculiar to the embedded store: one statement each way, its log, its idle names."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from holdfast.claim import Busy, Grant, Mode
from holdfast.core.contract import IDLE_COUNTER_SECONDS
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.stores.sqlite import backend as sqlite
from holdfast.stores.sqlite import schema as sqlite_schema
from holdfast.stores.sqlite.backend import SqliteBackend
from stores.sqlite.helpers import backend_of, claim, store_of, take, try_to_take


def statements_of(backend: SqliteBackend, said: list[str]) -> None:
    connection = backend._connection._database
    assert connection is not None
    connection.set_trace_callback(said.append)


def size_of_log(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


def rows(path: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def test_an_uncontended_hold_is_one_statement_each_way(tmp_path: Path) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        assert run_now(backend.release(take(backend)))
        said: list[str] = []
        statements_of(backend, said)
        assert run_now(backend.release(take(backend)))
        assert [statement.split()[0] for statement in said] == ["INSERT", "UPDATE"]


def test_the_fast_path_returns_when_other_claims_are_gone(tmp_path: Path) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        held, asked = take(backend), claim()
        assert isinstance(try_to_take(backend, asked), Busy)
        assert run_now(backend.release(held))
        assert run_now(backend.release(take(backend, asked)))
        said: list[str] = []
        statements_of(backend, said)
        assert run_now(backend.release(take(backend)))
        assert [statement.split()[0] for statement in said] == ["INSERT", "UPDATE"]


def test_an_exchange_is_one_transaction(tmp_path: Path) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        held, asked = take(backend), claim()
        assert isinstance(try_to_take(backend, asked), Busy)
        said: list[str] = []
        statements_of(backend, said)
        ours, answer = run_now(backend.exchange(held, asked))
        assert ours
        assert isinstance(answer, Grant)
        assert said.count("COMMIT") == 1


def test_a_thousand_renewals_are_one_transaction(tmp_path: Path) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        held = [take(backend, claim(f"name-{number}")) for number in range(1000)]
        said: list[str] = []
        statements_of(backend, said)
        assert not run_now(backend.renew(held, [], until=now() + 60)).lost
        assert said.count("BEGIN IMMEDIATE") == said.count("COMMIT")
        assert sum("UPDATE name SET ends" in statement for statement in said) == 1000
        assert said.index("COMMIT") >= 1000


def test_threads_share_a_backend(tmp_path: Path) -> None:
    """Sixteen threads, one connection: tokens stay in order, and two never hold at once."""
    tokens: list[int] = []
    inside: list[int] = []

    def work(backend: SqliteBackend) -> None:
        for _ in range(20):
            asked = claim()
            while isinstance(answer := try_to_take(backend, asked), Busy):
                run_now(backend.wait(asked, answer, now() + 60))
            inside.append(1)
            assert len(inside) == 1
            tokens.append(answer.token)
            inside.pop()
            assert run_now(backend.release(answer))

    with backend_of(tmp_path / "locks.db") as backend:
        threads = [threading.Thread(target=work, args=(backend,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(tokens) == 320
    assert tokens == sorted(set(tokens))


def test_the_log_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locks.db"
    monkeypatch.setattr(sqlite_schema, "WAL_LIMIT_BYTES", 200_000)
    monkeypatch.setattr(sqlite, "WAL_DUE_BYTES", 400_000)
    sizes: list[int] = []
    with backend_of(path) as backend, backend_of(path) as idle:
        run_now(idle.look("name"))  # another connection has the file open
        for _ in range(1500):
            assert run_now(backend.release(take(backend)))
            sizes.append(size_of_log(path))
        assert max(sizes) < 400_000 + 5 * 4200 * sqlite.MAINTENANCE_TRANSACTIONS
        assert sizes[-1] < max(sizes)  # it was cut
        assert rows(path, "PRAGMA quick_check") == [("ok",)]


def test_short_programs_also_copy_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locks.db"
    monkeypatch.setattr(sqlite_schema, "WAL_LIMIT_BYTES", 20_000)
    monkeypatch.setattr(sqlite, "WAL_DUE_BYTES", 40_000)
    sizes: list[int] = []
    with backend_of(path) as idle:
        run_now(idle.look("name"))  # so that no program is the last to close the file
        for _ in range(30):
            with backend_of(path) as backend:
                assert run_now(backend.release(take(backend)))
                sizes.append(size_of_log(path))
    assert max(sizes) < 100_000


def test_the_log_of_an_asyncio_client_is_copied_off_its_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "locks.db"
    monkeypatch.setattr(sqlite_schema, "WAL_LIMIT_BYTES", 200_000)
    monkeypatch.setattr(sqlite, "WAL_DUE_BYTES", 400_000)
    where: list[threading.Thread] = []
    real = sqlite.checkpoint

    def checkpoint(cursor: sqlite3.Cursor, path: str) -> bool:
        where.append(threading.current_thread())
        return real(cursor, path)

    monkeypatch.setattr(sqlite, "checkpoint", checkpoint)

    async def work() -> None:
        backend = store_of(path).backend(AsyncioRuntime())
        for _ in range(700):
            answer = await backend.attempt(claim(), join=True)
            assert isinstance(answer, Grant)
            assert await backend.release(answer)
        await backend.close()

    asyncio.run(work())
    assert where
    assert threading.main_thread() not in where


def test_no_other_connection_writes_while_the_log_is_copied(tmp_path: Path) -> None:
    """The fault of SQLite before 3.51.3 needs a writer that restarts the log at the same time."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend, backend_of(path) as writer:
        take(backend)
        run_now(writer.look("name"))
        connection = writer._connection._database
        assert connection is not None
        connection.execute("BEGIN IMMEDIATE")
        mine = backend._connection._database
        assert mine is not None
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sqlite.checkpoint(mine.cursor(), str(path))
        connection.execute("ROLLBACK")
        assert sqlite.checkpoint(mine.cursor(), str(path))
        assert rows(path, "PRAGMA wal_autocheckpoint") != [(0,)]  # ours alone are off:
        assert mine.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)


def test_idle_names_are_forgotten_after_a_week(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        idle = take(backend, claim("idle"))
        assert run_now(backend.release(idle))
        take(backend, claim("held", ttl=1e6))
        take(backend, claim("shared", Mode.SHARED, ttl=1e6))
        later = time.time() + IDLE_COUNTER_SECONDS + 60
        assert run_now(backend._connection.run(sqlite.purge, now(), time.time())) == 0
        assert run_now(backend._connection.run(sqlite.purge, now(), later)) == 1
        assert sorted(rows(path, "SELECT substr(name, 10) FROM name")) == [("held",), ("shared",)]
        monkeypatch.setattr(sqlite, "wall_seconds", lambda: later)
        assert take(backend, claim("idle")).token > idle.token


def test_a_purge_goes_on_where_it_left_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        with monkeypatch.context() as long_ago:
            long_ago.setattr(sqlite, "wall_seconds", lambda: 1e9)
            backend._maintain_at = 1 << 62  # a purge by maintenance would advance the mark
            for number in range(sqlite.PURGED_ROWS + 10):
                assert run_now(backend.release(take(backend, claim(f"name-{number}"))))
        forgotten = [
            run_now(backend._connection.run(sqlite.purge, now(), time.time())) for _ in range(2)
        ]
        assert forgotten == [sqlite.PURGED_ROWS, 10]
        assert rows(path, "SELECT count(*) FROM name") == [(0,)]


def test_records_outlive_the_hold_and_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend)
        assert run_now(backend.record(held, "done", 3600))
        assert run_now(backend.release(held))
        assert not run_now(backend.record(held, "late", 3600))
    with backend_of(path) as backend:
        record = run_now(backend.recall("name"))
        assert record is not None
        assert (record.value, record.token) == ("done", held.token)


def test_records_expire(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend)
        assert run_now(backend.record(held, "short", -1))
        assert run_now(backend.recall("name")) is None
        run_now(backend._connection.run(sqlite.purge, now(), time.time()))
        assert rows(path, "SELECT count(*) FROM record") == [(0,)]


def test_a_survey_passes_idle_names_page_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.stores.sqlite.inspect.MOST_ROWS", 10)
    with backend_of(tmp_path / "locks.db") as backend:
        for number in range(50):
            held = take(backend, claim(f"a-{number:02}"))
            if number % 20:
                assert run_now(backend.release(held))
        take(backend, claim("b"))
        found: list[str] = []
        cursor, pages = None, 0
        while cursor is not None or not pages:
            page = run_now(backend.survey("a-", cursor, 2))
            found += [info.name for info in page.infos]
            cursor, pages = page.cursor, pages + 1
            assert pages < 20
        assert found == ["a-00", "a-20", "a-40"]


def test_namespaces_are_separate(tmp_path: Path) -> None:
    from holdfast.core.contract import Settings
    from holdfast.io.runtime_blocking import BlockingRuntime
    from holdfast.url import open_store

    with backend_of(tmp_path / "locks.db") as one:
        take(one)
        settings = Settings(namespace="other")
        other = open_store(f"sqlite://{tmp_path}/locks.db", settings).backend(BlockingRuntime())
        assert isinstance(run_now(other.attempt(claim(), join=False)), Grant)
        assert len(run_now(other.survey("", None, 10)).infos) == 1
        run_now(other.close())


def test_probe_shows_what_the_guarantees_depend_on(tmp_path: Path) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        findings = {finding.subject: finding for finding in run_now(backend.probe())}
    assert findings["contents"].level == "ok"
    assert str(tmp_path) in findings["file"].detail
    assert sqlite3.sqlite_version in findings["SQLite"].detail

"""Rows of idle names on both SQL stores, in both modes: deleted by programs of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import psycopg
import pytest

import holdfast
from holdfast.core.contract import Settings
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores._sql import purge
from holdfast.stores.mysql import backend as mysql
from holdfast.stores.postgres import backend as postgres
from holdfast.stores.postgres_advisory import backend as postgres_advisory
from holdfast.url import open_store
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.registry import Servers
from stores.mysql.helpers import open_admin

WEEK = 8 * 86400
AGE = {
    "postgres lease": f"UPDATE holdfast.lock SET used = used - interval '{WEEK} s'",
    "postgres advisory": f"UPDATE holdfast.counter SET used = used - interval '{WEEK} s'",
    "mysql lease": f"UPDATE holdfast_lock SET version = version - {WEEK} * 1000000",
    "mysql advisory": f"UPDATE holdfast_counter SET since = since - {WEEK} * 1000000",
}
MODES = list(AGE)
GUARDED = pytest.mark.parametrize("rows", MODES[:3], indirect=True)
"""The rows that transactions of an application may lock."""
DEAD_WAITER = """
INSERT INTO holdfast.waiter (namespace, name, place, owner, mode, weight, since, refreshed, bell,
  ring, label)
VALUES ('{0}', 'old', 1, '{0}', 'exclusive', 0, now() - interval '9 days',
  now() - interval '9 days', '', '', '')"""


class Rows(NamedTuple):
    """The rows of one namespace, seen by an administrator."""

    url: str
    namespace: str
    table: str
    age_sql: str
    open: Callable[[], Any]

    def ask(self, sql: str) -> list[Any]:
        """Runs a statement. Returns the first column, names as text."""
        with closing(self.open()) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            found = cursor.fetchall() if cursor.description else []
        return [row[0].decode() if isinstance(row[0], bytes) else row[0] for row in found]

    @property
    def where(self) -> str:
        return f" WHERE namespace = '{self.namespace}'"

    def names(self) -> list[str]:
        return self.ask(f"SELECT name FROM {self.table}{self.where} ORDER BY name")

    def hold(self, *names: str) -> None:
        """A program that holds these names, one after the other."""
        with holdfast.connect(self.url, namespace=self.namespace) as locks:
            for name in names:
                with locks.lock(name):
                    pass

    def age(self, start: str) -> None:
        """The names with this start were last used more than a week ago."""
        self.ask(f"{self.age_sql}{self.where} AND name LIKE '{start}%'")


@pytest.fixture(params=MODES)
def rows(request: pytest.FixtureRequest, servers: Servers, namespace: str) -> Rows:
    store, mode = request.param.split()
    table = "lock" if mode == "lease" else "counter"
    if store == "postgres":
        url = servers.of(PostgresServer).url

        def connect() -> Any:
            return psycopg.connect(url, autocommit=True)

        table = f"holdfast.{table}"
    else:
        server = servers.of(MySQLServer)
        url, table = server.url, f"holdfast_{table}"

        def connect() -> Any:
            return open_admin(server)

    return Rows(f"{url}?mode={mode}", namespace, table, AGE[request.param], connect)


@pytest.fixture
def purge_at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, every client purges after its first attempt, in steps of ten names."""

    def start() -> None:
        monkeypatch.setattr(purge, "randbelow", lambda most: 0)
        for module in (mysql, postgres, postgres_advisory):
            monkeypatch.setattr(module, "PURGED_NAMES", 10)

    return start


@pytest.fixture
def locked() -> Iterator[Callable[[Rows, str], Any]]:
    """Locks the row of a name in a transaction that stays open until the end of the test."""
    with ExitStack() as open_ones:

        def lock(rows: Rows, name: str) -> Any:
            connection = rows.open()
            open_ones.callback(connection.close)
            cursor = connection.cursor()
            cursor.execute("BEGIN")
            cursor.execute(f"SELECT 1 FROM {rows.table}{rows.where} AND name = '{name}' FOR UPDATE")
            return connection

        yield lock


def test_short_programs_purge_every_idle_name(
    rows: Rows, purge_at_once: Callable[[], None]
) -> None:
    """Programs with a single hold delete all idle rows, however many names come before them."""
    young = [f"a{number:02}" for number in range(15)]
    rows.hold(*young, *(f"b{number:02}" for number in range(15)))
    rows.age("b")
    purge_at_once()
    for _ in range(4):
        rows.hold("a00")
    assert rows.names() == young


def test_the_first_purge_of_a_client_is_at_random(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with one attempt purges once in ``PURGE_EVERY`` runs; so does a forked child."""
    asked: list[int] = []

    def randbelow(most: int) -> int:
        asked.append(most)
        return len(asked)

    monkeypatch.setattr(purge, "randbelow", randbelow)
    backend: Any = open_store(rows.url, Settings(namespace=rows.namespace)).backend(
        BlockingRuntime()
    )
    assert backend._until_purge == 2
    backend.forget()
    assert backend._until_purge == 3
    assert asked == [purge.PURGE_EVERY] * 2


@GUARDED
def test_a_purge_does_not_wait_for_a_row_in_use(
    rows: Rows, purge_at_once: Callable[[], None], locked: Callable[[Rows, str], Any]
) -> None:
    """A transaction, of a guard for example, has locked a row that is not idle."""
    rows.hold("old", "young")
    rows.age("old")
    locked(rows, "young")
    purge_at_once()
    rows.hold("another")
    assert rows.names() == ["another", "young"]


@GUARDED
def test_a_purge_does_not_wait_for_an_idle_row_that_is_locked(
    rows: Rows, purge_at_once: Callable[[], None], locked: Callable[[Rows, str], Any]
) -> None:
    """A purge that waited with rows locked could be part of a deadlock. The row is deleted by a
    purge after the transaction has ended."""
    rows.hold("old", "young")
    rows.age("old")
    if rows.table == "holdfast.lock":
        rows.ask(DEAD_WAITER.format(rows.namespace))
    other = locked(rows, "old")
    purge_at_once()
    started = now()
    rows.hold("another")
    assert now() - started < Settings().request_seconds - 1  # or it waited, and was given up
    assert rows.names() == ["another", "old", "young"]
    if rows.table == "holdfast.lock":  # the transaction goes on as a client's would
        other.cursor().execute(f"DELETE FROM holdfast.waiter{rows.where}")
    other.cursor().execute("COMMIT")
    rows.hold("another")
    assert rows.names() == ["another", "young"]


def test_a_row_whose_token_is_above_the_clock_is_kept(
    rows: Rows, purge_at_once: Callable[[], None]
) -> None:
    """The clock was set back since. Without the row the next token would be lower."""
    rows.hold("old", "other")
    future = 2**61
    rows.ask(f"UPDATE {rows.table} SET token = {future}{rows.where} AND name = 'old'")
    rows.age("o")
    purge_at_once()
    rows.hold("young")
    assert rows.names() == ["old", "young"]
    with holdfast.connect(rows.url, namespace=rows.namespace) as locks, locks.lock("old") as lease:
        assert lease.token == future + 1

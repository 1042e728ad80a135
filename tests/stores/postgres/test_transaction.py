"""``transaction_lock`` on PostgreSQL: what it excludes, for how long, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy

import holdfast
from holdfast.claim import Fence
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import LimitMismatch, LockTimeout, Unsupported
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.sql import TransactionLock, transaction_lock
from holdfast.stores.postgres.advisory_sql import base_key
from holdfast.url import open_store
from servers.postgres import PostgresServer
from servers.registry import Servers

Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def server(servers: Servers) -> PostgresServer:
    made = servers.of(PostgresServer)
    with holdfast.connect(made.url) as locks:
        locks.list()  # makes the tables
    return made


@pytest.fixture
def ours(server: PostgresServer) -> Iterator[Connection]:
    with psycopg.connect(server.url) as connection:
        yield connection


@pytest.fixture
def theirs(server: PostgresServer) -> Iterator[Connection]:
    with psycopg.connect(server.url) as connection:
        yield connection


def take(connection: Connection, namespace: str, timeout: float | None = None) -> TransactionLock:
    taken = transaction_lock(connection, "name", namespace=namespace, timeout=timeout)
    assert isinstance(taken, TransactionLock)
    return taken


def test_transactions_exclude_each_other(
    ours: Connection, theirs: Connection, namespace: str
) -> None:
    """Held until commit or rollback; tokens grow; the fence has name and token."""
    first = take(ours, namespace)
    assert first.fence == Fence.parse(str(first.fence))
    assert (first.fence.name, first.fence.token) == ("name", first.token)
    for timeout in (0.0, 0.2):
        with pytest.raises(LockTimeout, match="'name' was not locked"):
            take(theirs, namespace, timeout)
    assert theirs.execute("SELECT 1").fetchone() == (1,)  # the transaction goes on
    assert theirs.execute("SHOW lock_timeout").fetchone() == ("0",)
    ours.commit()
    second = take(theirs, namespace, 0.2)
    assert second.token > first.token
    theirs.rollback()
    assert take(ours, namespace).token > second.token


def test_a_waiter_gets_it_when_the_transaction_ends(
    ours: Connection, theirs: Connection, namespace: str
) -> None:
    """It waits with and without a timeout, and keeps the transaction's own ``lock_timeout``."""
    for timeout in (None, 30.0):
        first = take(ours, namespace)
        tokens: list[int] = []

        def wait(timeout: float | None = timeout, tokens: list[int] = tokens) -> None:
            tokens.append(take(theirs, namespace, timeout).token)
            assert theirs.execute("SHOW lock_timeout").fetchone() == ("0",)
            theirs.commit()

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        ours.commit()
        thread.join(30)
        assert tokens[0] > first.token


def test_it_excludes_locks_of_advisory_mode(
    server: PostgresServer, ours: Connection, namespace: str
) -> None:
    """The same key and the same counter: in both directions, with tokens in one order."""
    with holdfast.connect(f"{server.url}?mode=advisory", namespace=namespace) as locks:
        with locks.lock("name") as lease, pytest.raises(LockTimeout):
            take(ours, namespace, 0.1)
        ours.rollback()
        mine = take(ours, namespace)
        assert mine.token > lease.token
        assert locks.lock("name").acquire(timeout=1) is None
        ours.commit()
        with locks.lock("name", timeout=20) as later:
            assert later.token > mine.token


def test_it_does_not_exclude_lease_rows(
    server: PostgresServer, ours: Connection, namespace: str
) -> None:
    """A lease row and a transaction lock are independent, as the documentation says."""
    with holdfast.connect(server.url, namespace=namespace) as locks, locks.lock("name") as lease:
        assert take(ours, namespace, 0).token > 0
        assert lease.held


def test_a_semaphore_is_refused(server: PostgresServer, ours: Connection, namespace: str) -> None:
    """A name that is in use as a semaphore is refused, and free again afterwards."""
    with holdfast.connect(f"{server.url}?mode=advisory", namespace=namespace) as locks:
        with locks.semaphore("name", 2):
            with pytest.raises(LimitMismatch):
                take(ours, namespace, 0)
            ours.rollback()
        assert take(ours, namespace, 0).token > 0
        ours.commit()
        with locks.semaphore("name", 3) as lease:
            assert lease.held


def test_what_would_protect_nothing_is_refused(
    server: PostgresServer, ours: Connection, namespace: str
) -> None:
    """No transaction, one with an old snapshot, no tables, another kind of connection."""
    with psycopg.connect(server.url, autocommit=True) as loose:
        with pytest.raises(Unsupported, match="needs a transaction"):
            transaction_lock(loose, "name", namespace=namespace)
        with loose.transaction():
            assert transaction_lock(loose, "name", namespace=namespace).token > 0
    ours.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(Unsupported, match="repeatable read"):
        take(ours, namespace)
    ours.rollback()
    ours.isolation_level = None
    with pytest.raises(Unsupported, match="holdfast schema postgresql"):
        transaction_lock(ours, "name", schema="nowhere")
    assert ours.execute("SELECT 1").fetchone() == (1,)  # the transaction goes on
    with pytest.raises(ValueError, match="schema="):
        transaction_lock(ours, "name", schema="a;b")
    with pytest.raises(holdfast.InvalidName):
        transaction_lock(ours, "")
    with pytest.raises(TypeError):
        transaction_lock(object(), "name")


def test_on_asyncio_it_is_awaited(server: PostgresServer, namespace: str) -> None:
    """``psycopg.AsyncConnection``, with the same arguments."""

    async def body() -> None:
        async with (
            await psycopg.AsyncConnection.connect(server.url) as first,
            await psycopg.AsyncConnection.connect(server.url) as second,
        ):
            async with first.transaction():
                mine = await transaction_lock(first, "name", namespace=namespace)
                with pytest.raises(LockTimeout):
                    await transaction_lock(second, "name", namespace=namespace, timeout=0.1)
            later = await transaction_lock(second, "name", namespace=namespace, timeout=5)
            assert later.token > mine.token

    asyncio.run(body())


def test_through_sqlalchemy(server: PostgresServer, ours: Connection, namespace: str) -> None:
    """A SQLAlchemy connection's transaction is a transaction like any other."""
    engine = sqlalchemy.create_engine(server.url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        mine = transaction_lock(connection, "name", namespace=namespace, timeout=1)
        with pytest.raises(LockTimeout):
            take(ours, namespace, 0.1)
        ours.rollback()
    taken = take(ours, namespace, 5)
    assert taken.token > mine.token
    with engine.begin() as connection, pytest.raises(LockTimeout):
        transaction_lock(connection, "name", namespace=namespace, timeout=0.1)
    engine.dispose()


def test_its_key_is_the_documented_one(ours: Connection, namespace: str) -> None:
    """The holder can be found in ``pg_locks``: the key is the digest of namespace and name."""
    take(ours, namespace)
    found = ours.execute(
        "SELECT pid = pg_backend_pid() FROM holdfast.keys WHERE key = %s",
        (base_key(namespace, "name"),),
    ).fetchall()
    assert found == [(True,)]


@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_idle_counters_are_purged_unless_they_are_in_use(
    server: PostgresServer, ours: Connection, theirs: Connection, namespace: str, mode: str
) -> None:
    """A client deletes counters unused for a week, and never waits for a transaction."""
    token = take(ours, namespace).token
    age = "UPDATE holdfast.counter SET used = used - interval '8 days' WHERE namespace = %s"
    ours.execute(age, (namespace,))
    ours.commit()
    count = "SELECT count(*) FROM holdfast.counter WHERE namespace = %s"
    backend: Any = open_store(f"{server.url}?mode={mode}", Settings(namespace=namespace)).backend(
        BlockingRuntime()
    )
    take(theirs, namespace)
    for left in (1, 0):
        backend._until_purge = 0
        run_now(backend.renew([], [], until=now() + 60))
        theirs.rollback()
        assert ours.execute(count, (namespace,)).fetchone() == (left,)
        ours.rollback()
    assert take(ours, namespace).token > token
    run_now(backend.close())

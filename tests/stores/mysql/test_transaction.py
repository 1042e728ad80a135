"""``transaction_lock`` on MySQL: what it excludes, how long, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import asyncmy
import pymysql
import pytest
import sqlalchemy

import holdfast
from holdfast.claim import Fence
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import LockTimeout, Unsupported
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.sql import TransactionLock, transaction_lock
from holdfast.url import open_store
from servers.mysql import MySQLServer
from servers.process import wait_until
from servers.registry import Servers
from stores.mysql.helpers import open_admin


@pytest.fixture
def server(servers: Servers) -> MySQLServer:
    made = servers.of(MySQLServer)
    with holdfast.connect(made.url) as locks:
        locks.list()  # creates the tables
    return made


def given(server: MySQLServer) -> dict[str, Any]:
    url = urlsplit(server.url)
    words = {"host": url.hostname, "port": url.port, "user": url.username}
    return words | {"password": url.password, "database": url.path.strip("/")}


@pytest.fixture
def ours(server: MySQLServer) -> Iterator[pymysql.Connection[Any]]:
    with pymysql.connect(**given(server)) as connection:
        yield connection


@pytest.fixture
def theirs(server: MySQLServer) -> Iterator[pymysql.Connection[Any]]:
    with pymysql.connect(**given(server)) as connection:
        yield connection


def take(
    connection: pymysql.Connection[Any], namespace: str, timeout: float | None = None
) -> TransactionLock:
    taken = transaction_lock(connection, "name", namespace=namespace, timeout=timeout)
    assert isinstance(taken, TransactionLock)
    return taken


def asked(connection: pymysql.Connection[Any], sql: str) -> object:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()


def test_transactions_exclude_each_other(
    ours: pymysql.Connection[Any], theirs: pymysql.Connection[Any], namespace: str
) -> None:
    """Held until commit or rollback; tokens grow; the fence has the name and the token."""
    first = take(ours, namespace)
    assert first.fence == Fence.parse(str(first.fence))
    assert (first.fence.name, first.fence.token) == ("name", first.token)
    before = asked(theirs, "SELECT @@innodb_lock_wait_timeout")
    with theirs.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE mine (n INT) ENGINE=InnoDB")
        cursor.execute("INSERT INTO mine VALUES (7)")
    for timeout in (0.0, 0.2):
        with pytest.raises(LockTimeout, match="'name' was not locked"):
            take(theirs, namespace, timeout)
    assert asked(theirs, "SELECT n FROM mine") == (7,)  # the transaction goes on
    assert asked(theirs, "SELECT @@innodb_lock_wait_timeout") == before
    ours.commit()
    second = take(theirs, namespace, 0.2)
    assert second.token > first.token
    theirs.rollback()
    assert take(ours, namespace).token > second.token


def test_a_waiter_gets_it_when_the_transaction_ends(
    ours: pymysql.Connection[Any], theirs: pymysql.Connection[Any], namespace: str
) -> None:
    """Without a timeout, and within one."""
    for timeout in (None, 30.0):
        first = take(ours, namespace)
        tokens: list[int] = []

        def wait(timeout: float | None = timeout, tokens: list[int] = tokens) -> None:
            tokens.append(take(theirs, namespace, timeout).token)
            theirs.commit()

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        ours.commit()
        thread.join(30)
        assert tokens[0] > first.token


def test_a_transaction_that_began_earlier_and_locks_later_has_a_higher_token(
    ours: pymysql.Connection[Any], theirs: pymysql.Connection[Any], namespace: str
) -> None:
    """A rollback undoes the increment, so that only the clock orders the next token. The clock is
    read after the wait."""
    take(ours, namespace)
    ours.commit()
    asked(ours, f"SELECT 1 FROM holdfast_transaction WHERE namespace = '{namespace}' FOR UPDATE")
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(take(theirs, namespace).token))
    thread.start()
    waiting = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    for _ in range(200):
        if asked(ours, waiting) == (1,):
            break
        thread.join(0.15)  # queried more often, InnoDB answers from a cache
    assert thread.is_alive()
    first = take(ours, namespace)
    ours.rollback()
    thread.join(30)
    assert later[0] > first.token


@pytest.mark.parametrize("suffix", ["", "?mode=advisory"])
def test_it_does_not_exclude_locks_of_a_client(
    server: MySQLServer, ours: pymysql.Connection[Any], namespace: str, suffix: str
) -> None:
    """Neither waits for the other, as documented."""
    with holdfast.connect(server.url + suffix, namespace=namespace) as locks:
        with locks.lock("name") as lease:
            assert take(ours, namespace, 0).token > 0
            assert lease.held
        with locks.lock("name", timeout=5) as lease:  # the transaction is still open
            assert lease.held


def test_names_are_bytes(
    ours: pymysql.Connection[Any], theirs: pymysql.Connection[Any], namespace: str
) -> None:
    """Case, accents and blanks count; 512 bytes fit."""
    names = ("name", "Name", "namé", "name ", "n" * 512)
    for name in names:
        transaction_lock(ours, name, namespace=namespace, timeout=0)
    for name in names:
        with pytest.raises(LockTimeout):
            transaction_lock(theirs, name, namespace=namespace, timeout=0)
    transaction_lock(theirs, "NAME", namespace=namespace, timeout=0)


def test_what_would_protect_nothing_is_refused(server: MySQLServer, namespace: str) -> None:
    """No transaction, no tables, another kind of connection."""
    with pymysql.connect(**given(server), autocommit=True) as loose:
        with pytest.raises(Unsupported, match="needs a transaction"):
            transaction_lock(loose, "name", namespace=namespace)
        loose.begin()
        assert transaction_lock(loose, "name", namespace=namespace).token > 0
        with pytest.raises(Unsupported, match="holdfast schema mysql"):
            transaction_lock(loose, "name", prefix="nowhere_")
        assert asked(loose, "SELECT 1") == (1,)  # the transaction goes on
        with pytest.raises(ValueError, match="prefix="):
            transaction_lock(loose, "name", prefix="a;b")


def test_on_asyncio_it_is_awaited(server: MySQLServer, namespace: str) -> None:
    """``asyncmy``, with the same arguments."""

    async def body() -> None:
        async with (
            asyncmy.connect(**given(server)) as first,
            asyncmy.connect(**given(server)) as second,
        ):
            mine = await transaction_lock(first, "name", namespace=namespace)
            with pytest.raises(LockTimeout):
                await transaction_lock(second, "name", namespace=namespace, timeout=0)
            await first.commit()
            later = await transaction_lock(second, "name", namespace=namespace, timeout=5)
            assert later.token > mine.token

    asyncio.run(body())


def test_through_sqlalchemy(
    server: MySQLServer, ours: pymysql.Connection[Any], namespace: str
) -> None:
    """A SQLAlchemy connection's transaction is a transaction like any other."""
    engine = sqlalchemy.create_engine(server.url.replace("mysql://", "mysql+pymysql://"))
    with engine.begin() as connection:
        mine = transaction_lock(connection, "name", namespace=namespace, timeout=1)
        with pytest.raises(LockTimeout):
            take(ours, namespace, 0)
        ours.rollback()
    taken = take(ours, namespace, 5)
    assert taken.token > mine.token
    with engine.begin() as connection, pytest.raises(LockTimeout):
        transaction_lock(connection, "name", namespace=namespace, timeout=0)
    engine.dispose()


@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_idle_rows_are_purged_unless_a_transaction_holds_one(
    server: MySQLServer,
    ours: pymysql.Connection[Any],
    theirs: pymysql.Connection[Any],
    namespace: str,
    mode: str,
) -> None:
    """A client deletes rows that were not used for a week, and never waits for a transaction."""
    token = take(ours, namespace).token
    ours.commit()
    with ours.cursor() as cursor:
        age = "UPDATE holdfast_transaction SET token = token - 8 * 86400 * 1000000"
        assert cursor.execute(f"{age} WHERE namespace = '{namespace}'") == 1
    ours.commit()
    count = f"SELECT COUNT(*) FROM holdfast_transaction WHERE namespace = '{namespace}'"
    backend = open_store(f"{server.url}?mode={mode}", Settings(namespace=namespace)).backend(
        BlockingRuntime()
    )
    take(theirs, namespace)
    _purge(backend)
    theirs.rollback()
    assert asked(ours, count) == (1,)
    ours.rollback()
    _purge(backend)
    assert asked(ours, count) == (0,)
    ours.rollback()
    assert take(ours, namespace).token > token
    run_now(backend.close())


def _purge(backend: Any) -> None:
    backend._until_purge = 0
    run_now(backend.renew([], [], until=now() + 60))


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_rollback_of_the_first_transaction_of_a_name_lets_all_others_in(
    server: MySQLServer, ours: pymysql.Connection[Any], namespace: str, timeout: float | None
) -> None:
    """They wait to insert a row that vanishes: InnoDB rolls back all of them but one. That is
    repeated if the lock was the first statement of its transaction; else it is the caller's."""
    tokens: list[int] = []
    errors: list[object] = []

    def wait(begun: bool) -> None:
        with pymysql.connect(**given(server)) as connection:
            if begun:
                connection.begin()
            try:
                token = take(connection, namespace, timeout).token
                tokens.append(token)
                connection.commit()
            except pymysql.MySQLError as error:
                errors.append((begun, error.args[0]))

    take(ours, namespace)
    threads = [threading.Thread(target=wait, args=(number == 0,)) for number in range(5)]
    for thread in threads:
        thread.start()
    wait_until("all to wait for the row", lambda: _waiting(server) >= len(threads))
    ours.rollback()
    for thread in threads:
        thread.join(60)
    assert len(set(tokens)) == len(threads) - len(errors)
    assert errors in ([], [(True, 1213)])


def _waiting(server: MySQLServer) -> int:
    with open_admin(server) as admin, admin.cursor() as cursor:
        cursor.execute(
            "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        )
        return int(cursor.fetchone()[0])

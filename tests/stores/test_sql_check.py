"""``check()`` of PostgreSQL and MySQL says what is there, and writes nothing."""

from __future__ import annotations

import secrets

import psycopg
import pytest

import holdfast
from holdfast.errors import Incompatible, Unsupported
from servers.postgres import PostgresServer
from stores import sql_helpers
from stores.mysql import helpers as mysql_helpers
from stores.sql_helpers import MODES, Clients, MySQL, Postgres, Store

store, clients = sql_helpers.store, sql_helpers.clients


def fresh(store: Store, mode: str) -> tuple[str, str]:
    """Returns a URL whose tables do not exist, and the beginning of their names."""
    word = f"c{secrets.token_hex(4)}"
    option = f"schema={word}" if isinstance(store, Postgres) else f"prefix={word}_"
    return f"{store.url(mode)}&{option}", word


def tables(store: Store, word: str) -> int:
    """Counts the tables and schemas that begin with the word."""
    if isinstance(store, Postgres):
        sql = "SELECT count(*) FROM pg_namespace WHERE nspname = %s"
        ((count,),) = store._admin.execute(sql, (word,)).fetchall()
        return int(count)
    assert isinstance(store, MySQL)
    sql = "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_NAME LIKE %s"
    ((count,),) = mysql_helpers.rows(store._admin, sql, f"{word}%")
    return int(count)


@pytest.mark.parametrize("mode", MODES)
def test_check_makes_no_tables(store: Store, clients: Clients, mode: str) -> None:
    url, word = fresh(store, mode)

    async def body() -> None:
        locks = clients.open(url)
        found = {finding.subject: finding for finding in await locks.check()}
        needs = "" if isinstance(store, Postgres) else ", if this account has the right CREATE"
        assert found["tables"].detail == f"not there yet: the first acquire makes them{needs}"
        assert f"the first acquire binds it to {mode} mode" in found["namespace"].detail
        assert tables(store, word) == 0
        async with locks.lock("name"):
            found = {finding.subject: finding for finding in await locks.check()}
        assert found["tables"].detail == "there"
        assert f"is used in {mode} mode" in found["namespace"].detail
        assert tables(store, word) > 0

    clients.run(body)


@pytest.mark.parametrize("mode", MODES)
def test_check_binds_no_namespace(store: Store, clients: Clients, mode: str) -> None:
    """The other mode can still use a namespace that was only checked."""
    other = MODES[1 - MODES.index(mode)]

    async def body() -> None:
        async with clients.open(store.url(mode), namespace=f"n{secrets.token_hex(4)}").lock("made"):
            pass
        locks = clients.open(store.url(mode))
        found = {finding.subject: finding for finding in await locks.check()}
        assert "is not in use yet" in found["namespace"].detail
        async with clients.open(store.url(other)).lock("name"):
            pass
        with pytest.raises(Incompatible, match=f"{other} mode"):
            await locks.check()

    clients.run(body)


def test_check_by_a_role_that_may_not_make_the_tables(store: Store) -> None:
    """On PostgreSQL, where rights can be asked for, the answer is the one of the first acquire."""
    if not isinstance(store, Postgres):
        return
    url, word = fresh(store, "lease")
    store._admin.execute(f"CREATE ROLE {word} LOGIN".encode())
    with (
        holdfast.connect(url.replace("//holdfast@", f"//{word}@")) as locks,
        pytest.raises(Unsupported, match=f"holdfast schema postgresql --schema {word} | psql"),
    ):
        locks.check()
    store._admin.execute(f"DROP ROLE {word}".encode())


def test_check_says_that_an_old_snapshot_is_open(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of a row that such a transaction could read can't be removed."""
    monkeypatch.setattr("holdfast.stores.postgres.replies.LONG_TRANSACTION_SECONDS", 1.0)
    with (
        PostgresServer() as server,
        holdfast.connect(server.url, namespace=namespace) as locks,
        psycopg.connect(server.url) as old,
    ):
        found = {finding.subject: finding for finding in locks.check()}
        assert found["transactions"].level == "ok"
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("SELECT count(*) FROM pg_class")
        with psycopg.connect(server.url, autocommit=True) as other:
            other.execute("SELECT pg_sleep(1.1)")
        found = {finding.subject: finding for finding in locks.check()}
        assert found["transactions"].level == "warning"
        assert "slower" in found["transactions"].detail

"""The texts of a fence and of a lock never become SQL, whatever the session takes for a quote."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import asyncmy
import pymysql
import pytest

import holdfast
from fencing.accounts import mysql_settings
from fencing.databases import fence
from holdfast import StaleFence
from holdfast.fencing import sql
from holdfast.sql import transaction_lock
from servers.mysql import MySQLServer
from servers.registry import Servers

SESSIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "no backslashes": {"init_command": "SET sql_mode='NO_BACKSLASH_ESCAPES'"},
    "gbk": {"charset": "gbk"},
}
# In gbk the last byte of this letter and a backslash are one letter; elsewhere it is a letter.
LETTER = "\u4f7f"
ENDS_THE_LITERAL = [
    f"*/ ON DUPLICATE KEY UPDATE entries = LAST_INSERT_ID(IF(1 OR #{LETTER}',0,0,9,9,0) /*",
    "*/ ON DUPLICATE KEY UPDATE entries = LAST_INSERT_ID(IF(1 OR #x',0,0,9,9,0) /*",
    f"{LETTER}', 1); UPDATE holdfast_fence SET name = 'owned'; -- ",
    "x', 1); UPDATE holdfast_fence SET name = 'owned'; -- ",
    "x\\",
]


@pytest.fixture
def settings(servers: Servers) -> dict[str, Any]:
    server = servers.of(MySQLServer)
    with holdfast.connect(server.url) as locks:
        locks.list()  # makes the tables
    return mysql_settings(server.url)


async def connected(driver: str, settings: dict[str, Any], session: str) -> Any:
    if driver == "pymysql":
        return pymysql.connect(**{**settings, **SESSIONS[session]})
    return await asyncmy.connect(**settings, **SESSIONS[session])


async def done(answer: Any) -> Any:
    return await answer if hasattr(answer, "__await__") else answer


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("driver", ["pymysql", "asyncmy"])
def test_a_fence_s_text_is_no_sql(settings: dict[str, Any], driver: str, session: str) -> None:
    """A fence comes from a caller's header: one of another lock is refused, nothing else runs."""

    namespace = secrets.token_hex(8)

    async def body() -> None:
        connection = await connected(driver, settings, session)
        await done(sql.create(connection))
        await done(sql.guard(connection, namespace, fence(1000)))
        await done(connection.commit())
        for name in ENDS_THE_LITERAL:
            with pytest.raises(StaleFence, match="guarded by the lock 'lock'"):
                await done(sql.guard(connection, namespace, fence(2000, name=name)))
            await done(connection.rollback())
            await done(sql.guard(connection, namespace + name, fence(1, name=name)))
            with pytest.raises(StaleFence, match="token 1,"):
                await done(sql.guard(connection, namespace + name, fence(0, name=name)))
            await done(connection.rollback())
        await done(sql.guard(connection, namespace, fence(1000)))
        await done(connection.rollback())
        connection.close()

    asyncio.run(body())


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("driver", ["pymysql", "asyncmy"])
def test_a_lock_s_name_is_no_sql(settings: dict[str, Any], driver: str, session: str) -> None:
    """Nor is its namespace: each name is locked as it reads, byte by byte."""

    namespace = secrets.token_hex(8)

    async def body() -> None:
        connection = await connected(driver, settings, session)
        for name in ENDS_THE_LITERAL:
            asked = namespace + name
            lock = await done(transaction_lock(connection, name, namespace=asked))
            assert lock.fence.name == name
            assert is_locked(watcher, asked, name)
            await done(connection.rollback())
        connection.close()

    with pymysql.connect(**settings) as watcher:
        asyncio.run(body())


def is_locked(watcher: Any, namespace: str, name: str) -> bool:
    """Whether a transaction has the row of this name, told by one that does not wait for it."""
    where = f"namespace = X'{namespace.encode().hex()}' AND name = X'{name.encode().hex()}'"
    with watcher.cursor() as cursor:
        try:
            cursor.execute(f"SELECT 1 FROM holdfast_transaction WHERE {where} FOR UPDATE NOWAIT")
        except pymysql.MySQLError as error:
            return bool(error.args[0] == 1205)
        finally:
            watcher.rollback()
    return False

"""Locks that live in the caller's own SQL transaction, and what the SQL stores share.

with conn.transaction():
    lock = transaction_lock(conn, "order:42")
    ...  # alone until the transaction ends; lock.fence for everything outside of it
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Coroutine
from typing import Any, NamedTuple

from holdfast.claim import Fence, Mode, check_epoch, check_name
from holdfast.core.drive import run_now
from holdfast.errors import Unsupported

__all__ = ["TransactionLock", "check_identifier", "transaction_lock"]

_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_DIALECTS = {
    "postgresql": "holdfast.stores.postgres.transaction",
    "mysql": "holdfast.stores.mysql.transaction",
    "mariadb": "holdfast.stores.mysql.transaction",
}


class TransactionLock(NamedTuple):
    """What ``transaction_lock`` took. It ends with the transaction, by itself."""

    name: str
    token: int
    fence: Fence


class Asked(NamedTuple):
    """What a dialect's ``take`` is asked for. It answers the token."""

    name: str
    namespace: str
    timeout: float | None
    schema: str
    """Where the tables are, on PostgreSQL; empty for the usual place."""
    prefix: str
    savepoint: bool = False
    """Whether it may be taken inside a savepoint."""


def transaction_lock(
    connection: Any,
    name: str,
    *,
    timeout: float | None = None,
    namespace: str = "holdfast",
    epoch: int = 0,
    schema: str = "",
    prefix: str = "",
    savepoint: bool = False,
) -> Any:
    """Takes a lock that the caller's transaction holds until it ends, and answers its fence.

    It waits for other transactions that have it, for at most ``timeout`` seconds, and raises
    ``LockTimeout`` then; the transaction can go on. Take it before the first read. It excludes
    other transaction locks of the name; on PostgreSQL also ``lock()`` of the same namespace and
    name where the client is in advisory mode. It never excludes lease rows. On a connection of
    asyncio it is awaited. MySQL counts the timeout in whole seconds.

    Raises ``Unsupported`` where there is no transaction (autocommit), or one whose reads would
    be older than the lock (any isolation but read committed on PostgreSQL). Also inside a savepoint
    (a nested transaction), where that can be told: a rollback to it ends the lock and takes its
    token back, while the transaction goes on. ``savepoint=True`` allows it.
    """
    check_name(name)
    check_epoch(epoch)
    for word, text in (("schema", schema), ("prefix", prefix)):
        if text:
            check_identifier(text, word)
    from holdfast.fencing.sql.drivers import driver_of

    driver = driver_of(connection)
    work = _take(driver, Asked(name, namespace, timeout, schema, prefix, savepoint), epoch)
    return work if driver.asynchronous else run_now(work)


async def _take(driver: Any, asked: Asked, epoch: int) -> TransactionLock:
    if driver.dialect not in _DIALECTS:
        raise Unsupported(f"{driver.dialect} has no transaction_lock; PostgreSQL and MySQL do")
    if await driver.autocommit():
        raise Unsupported(
            f"transaction_lock({asked.name!r}) needs a transaction: in autocommit the lock would "
            "end at once"
        )
    if driver.in_savepoint() and not asked.savepoint:
        raise in_savepoint(asked)
    work: Coroutine[Any, Any, int] = importlib.import_module(_DIALECTS[driver.dialect]).take(
        driver, asked
    )
    token = await work
    return TransactionLock(asked.name, token, Fence(asked.name, Mode.EXCLUSIVE, (), epoch, token))


def in_savepoint(asked: Asked) -> Unsupported:
    """What is wrong with a lock that is taken inside a savepoint."""
    return Unsupported(
        f"transaction_lock({asked.name!r}) inside a savepoint (a nested transaction): a rollback "
        "to it ends the lock while the transaction goes on. Take it before the savepoint, or say "
        "savepoint=True if whoever rolls back to it does no more work under this lock"
    )


def check_identifier(text: str, what: str) -> str:
    """Returns the text if it can name a schema or a table anywhere; else ``ValueError``.

    >>> check_identifier("locks_2", "schema")
    'locks_2'
    """
    if _IDENTIFIER.fullmatch(text) is None:
        raise ValueError(
            f"{what}={text!r}: a name of up to 40 lower-case letters, digits and underscores"
        )
    return text

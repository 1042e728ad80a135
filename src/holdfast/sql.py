"""Locks that belong to the caller's own SQL transaction, and what the SQL stores share.

with conn.transaction():
    lock = transaction_lock(conn, "order:42")
    ...  # exclusive until the transaction ends; lock.fence protects resources outside of it
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
    """A lock from ``transaction_lock``. It ends with the transaction."""

    name: str
    token: int
    fence: Fence


class TransactionRequest(NamedTuple):
    """The argument of a dialect's ``take``, which returns the token."""

    name: str
    namespace: str
    timeout: float | None
    schema: str
    """The schema of the tables, on PostgreSQL; empty for the default."""
    prefix: str
    savepoint: bool = False
    """Whether it may be acquired inside a savepoint."""


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
    """Acquires a lock that the caller's transaction holds until it ends; returns it with its fence.

    It waits at most ``timeout`` seconds for other transactions that hold the lock, and then raises
    ``LockTimeout``; the transaction can continue. Acquire it before the first read. It excludes
    other transaction locks of the name; on PostgreSQL also ``lock()`` of the same namespace and
    name by a client in advisory mode. It never excludes lease rows. On an asyncio connection the
    result is awaited. MySQL counts the timeout in whole seconds.

    Raises ``Unsupported`` without a transaction (autocommit), and in a transaction whose reads
    could be older than the lock (on PostgreSQL any isolation but read committed). Raises it
    inside a savepoint (a nested transaction) too, if the driver reports one: a rollback to it
    ends the lock and takes its token back, while the transaction continues. ``savepoint=True``
    allows it.
    """
    check_name(name)
    check_epoch(epoch)
    for word, text in (("schema", schema), ("prefix", prefix)):
        if text:
            check_identifier(text, word)
    from holdfast.fencing.sql.drivers import driver_of

    driver = driver_of(connection)
    work = _take(
        driver, TransactionRequest(name, namespace, timeout, schema, prefix, savepoint), epoch
    )
    return work if driver.asynchronous else run_now(work)


async def _take(driver: Any, request: TransactionRequest, epoch: int) -> TransactionLock:
    if driver.dialect not in _DIALECTS:
        raise Unsupported(f"{driver.dialect} has no transaction_lock; PostgreSQL and MySQL do")
    if await driver.autocommit():
        raise Unsupported(
            f"transaction_lock({request.name!r}) needs a transaction: in autocommit the lock would "
            "end at once"
        )
    if driver.in_savepoint() and not request.savepoint:
        raise in_savepoint(request)
    work: Coroutine[Any, Any, int] = importlib.import_module(_DIALECTS[driver.dialect]).take(
        driver, request
    )
    token = await work
    return TransactionLock(
        request.name, token, Fence(request.name, Mode.EXCLUSIVE, (), epoch, token)
    )


def in_savepoint(request: TransactionRequest) -> Unsupported:
    """The error of a lock that is acquired inside a savepoint."""
    return Unsupported(
        f"transaction_lock({request.name!r}) inside a savepoint (a nested transaction): a rollback "
        "to it ends the lock while the transaction goes on. Acquire it before the savepoint, or "
        "pass savepoint=True if the code that rolls back does no more work under this lock"
    )


def check_identifier(text: str, what: str) -> str:
    """Returns the text if it can name a schema or table in every dialect; else ``ValueError``.

    >>> check_identifier("locks_2", "schema")
    'locks_2'
    """
    if _IDENTIFIER.fullmatch(text) is None:
        raise ValueError(
            f"{what}={text!r}: a name of up to 40 lower-case letters, digits and underscores"
        )
    return text

"""``transaction_lock`` on MySQL: the caller's transaction locks a row and increments its token.

The row is in a table of its own, so a transaction that stays open blocks other transaction locks
only. One statement waits for the row's lock; the next one increments and returns the token.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.errors import LockTimeout, Unsupported
from holdfast.io.clock import now
from holdfast.sql import TransactionRequest
from holdfast.stores.mysql.sql import UTC_MICROS, MySqlSchema

__all__ = ["take"]

_NOT_IN_TIME = 1205
_NO_TABLE = 1146
_NO_VARIABLE = 1193
_DEADLOCK = 1213
MOST_TRIES = 10

# Two statements: the time in a statement is that of its start, before it waited for the lock. In
# UTC, since a session's time zone may repeat an hour.
_LOCK = """
INSERT INTO @transaction (namespace, name, token) VALUES (UNHEX(:namespace), UNHEX(:name), 0)
ON DUPLICATE KEY UPDATE token = token"""
_COUNT = """
UPDATE @transaction SET token = LAST_INSERT_ID(GREATEST(token + 1, #utc#))
WHERE namespace = UNHEX(:namespace) AND name = UNHEX(:name)"""
_GALERA = "SELECT @@wsrep_on"  # Percona's server has no global variable of this name
_LOCK_WAIT_TIMEOUT = """
SELECT @@SESSION.innodb_lock_wait_timeout, @@GLOBAL.innodb_rollback_on_timeout, VERSION()"""
_SET_LOCK_WAIT_TIMEOUT = "SET SESSION innodb_lock_wait_timeout = :seconds"


async def take(driver: Any, asked: TransactionRequest) -> int:
    """Locks the row and returns its new token. Raises ``LockTimeout`` at the timeout, and
    ``Unsupported`` if the tables are missing or the server can't do this."""
    schema = MySqlSchema(asked.prefix or "holdfast_")
    # As hexadecimal digits: a driver's own quoting is not safe in every session (``fencing.sql``).
    given = {"namespace": asked.namespace.encode().hex(), "name": asked.name.encode().hex()}
    begun = await driver.begun()
    await _refuse_galera(driver, asked)
    try:
        return await _lock(driver, schema, given, asked.timeout, 1 if begun else MOST_TRIES)
    except Exception as error:
        code = _code(error)
        if code == _NO_TABLE:
            raise Unsupported(
                "Holdfast's tables are missing in this database: run the SQL that `holdfast schema "
                "mysql` prints, or acquire any lock through a client once"
            ) from None
        if code != _NOT_IN_TIME or asked.timeout is None:
            raise
        raise LockTimeout(
            f"{asked.name!r} was not locked within {asked.timeout:g} s: another transaction holds "
            "it",
            name=asked.name,
        ) from None


async def _refuse_galera(driver: Any, asked: TransactionRequest) -> None:
    """Raises ``Unsupported`` on Galera: a row is locked on one node only, so two transactions
    could hold one name with one token."""
    try:
        answer = await driver.execute(_GALERA, {})
    except Exception as error:
        if _code(error) != _NO_VARIABLE:
            raise
        return  # MySQL without Galera does not have the variable
    if int(answer.rows[0][0]):
        raise Unsupported(
            f"transaction_lock({asked.name!r}) is not possible on a Galera cluster, where a row is "
            "locked on one node only: use lock() of a client for mysql://"
        )


async def _lock(
    driver: Any, schema: MySqlSchema, given: dict[str, Any], timeout: float | None, tries: int
) -> int:
    """Locks the row and returns its new token, by so many tries: if the transaction that made the
    row is rolled back, the server rolls back all but one of those that wait for the row. That may
    be repeated if nothing else was in the transaction yet."""
    until = None if timeout is None else now() + timeout
    while True:
        try:
            if until is None:
                return await _count(driver, schema, given)
            return await _count_in_time(driver, schema, given, max(0.0, until - now()))
        except Exception as error:
            tries -= 1
            if not tries or _code(error) != _DEADLOCK:
                raise


async def _count(driver: Any, schema: MySqlSchema, given: dict[str, Any]) -> int:
    await driver.execute(schema.filled(_LOCK), given)
    counted = await driver.execute(schema.filled(_COUNT.replace("#utc#", UTC_MICROS)), given)
    return int(counted.inserted)


async def _count_in_time(
    driver: Any, schema: MySqlSchema, given: dict[str, Any], timeout: float
) -> int:
    """Waits at most ``timeout``, rounded up to whole seconds as the server does. A timeout undoes
    only the statement that waited.

    A query with NOWAIT first would lock the gap of a missing row, and so the names beside it. So
    MySQL, whose shortest wait is a second, waits for a second.
    """
    answer = await driver.execute(_LOCK_WAIT_TIMEOUT, {})
    before, undoes_all, version = answer.rows[0]
    if int(undoes_all):
        raise Unsupported(
            "innodb_rollback_on_timeout is set on this server: a timeout would roll back the "
            "caller's whole transaction"
        )
    least = 0 if "MariaDB" in str(version) else 1
    await driver.execute(_SET_LOCK_WAIT_TIMEOUT, {"seconds": max(least, math.ceil(timeout))})
    try:
        return await _count(driver, schema, given)
    finally:
        await driver.execute(_SET_LOCK_WAIT_TIMEOUT, {"seconds": int(before)})


def _code(error: BaseException) -> int:
    """Returns the server's error number, also from an error wrapped by SQLAlchemy; 0 if none."""
    found = getattr(error, "orig", error)
    code = found.args[0] if found.args else 0
    return code if isinstance(code, int) else 0

"""``transaction_lock`` on MySQL: a row that the caller's transaction locks and counts in.

The row is in a table of its own: a transaction that stays open blocks nobody but other
transaction locks. One statement waits for the row's lock, the next counts and answers the token.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.errors import LockTimeout, Unsupported
from holdfast.sql import Asked
from holdfast.stores.mysql.sql import UTC_MICROS, Schema

__all__ = ["take"]

_NOT_IN_TIME = 1205
_NO_TABLE = 1146
_NO_VARIABLE = 1193

# Two statements: the time that a statement sees is that of its begin, before it waited. In UTC, for
# the hour that a session's time zone may have twice.
_LOCK = """
INSERT INTO @transaction (namespace, name, token) VALUES (UNHEX(:namespace), UNHEX(:name), 0)
ON DUPLICATE KEY UPDATE token = token"""
_COUNT = """
UPDATE @transaction SET token = LAST_INSERT_ID(GREATEST(token + 1, #utc#))
WHERE namespace = UNHEX(:namespace) AND name = UNHEX(:name)"""
_GALERA = "SELECT @@wsrep_on"  # Percona's has no global one
_PATIENCE = """
SELECT @@SESSION.innodb_lock_wait_timeout, @@GLOBAL.innodb_rollback_on_timeout, VERSION()"""
_SET_PATIENCE = "SET SESSION innodb_lock_wait_timeout = :seconds"


async def take(driver: Any, asked: Asked) -> int:
    """Waits for the row, counts, and answers the token."""
    schema = Schema(asked.prefix or "holdfast_")
    # As hexadecimal digits: a driver's own quoting is not safe in every session (``fencing.sql``).
    given = {"namespace": asked.namespace.encode().hex(), "name": asked.name.encode().hex()}
    await _refuse_galera(driver, asked)
    try:
        if asked.timeout is None:
            return await _count(driver, schema, given)
        return await _count_in_time(driver, schema, given, asked.timeout)
    except Exception as error:
        code = _code(error)
        if code == _NO_TABLE:
            raise Unsupported(
                "Holdfast's tables are missing in this database: run what `holdfast schema mysql` "
                "prints, or take any lock through a client once"
            ) from None
        if code != _NOT_IN_TIME or asked.timeout is None:
            raise
        raise LockTimeout(
            f"{asked.name!r} was not locked within {asked.timeout:g} s: another transaction has it",
            name=asked.name,
        ) from None


async def _refuse_galera(driver: Any, asked: Asked) -> None:
    """Rows of Galera are locked on one node: two transactions could have one name and token."""
    try:
        answer = await driver.execute(_GALERA, {})
    except Exception as error:
        if _code(error) != _NO_VARIABLE:
            raise
        return  # MySQL as it is sold has none
    if int(answer.rows[0][0]):
        raise Unsupported(
            f"transaction_lock({asked.name!r}) is not possible on a Galera cluster, where a row is "
            "locked on one node only: use lock() of a client for mysql://"
        )


async def _count(driver: Any, schema: Schema, given: dict[str, Any]) -> int:
    await driver.execute(schema.filled(_LOCK), given)
    counted = await driver.execute(schema.filled(_COUNT.replace("#utc#", UTC_MICROS)), given)
    return int(counted.inserted)


async def _count_in_time(driver: Any, schema: Schema, given: dict[str, Any], timeout: float) -> int:
    """The server counts whole seconds. A wait in vain undoes that statement alone.

    A look with NOWAIT before it would lock the gap that a missing row leaves, and with it the
    names beside it; so MySQL, which can't wait for less, waits for a second.
    """
    answer = await driver.execute(_PATIENCE, {})
    before, undoes_all, version = answer.rows[0]
    if int(undoes_all):
        raise Unsupported(
            "this server ends whole transactions when a lock comes too late "
            "(innodb_rollback_on_timeout): a timeout would undo the caller's work"
        )
    least = 0 if "MariaDB" in str(version) else 1
    await driver.execute(_SET_PATIENCE, {"seconds": max(least, math.ceil(timeout))})
    try:
        return await _count(driver, schema, given)
    finally:
        await driver.execute(_SET_PATIENCE, {"seconds": int(before)})


def _code(error: BaseException) -> int:
    """The server's number for it, also inside an error of SQLAlchemy's."""
    found = getattr(error, "orig", error)
    code = found.args[0] if found.args else 0
    return code if isinstance(code, int) else 0

"""``transaction_lock`` on PostgreSQL: an advisory lock and its counter.

Both belong to the caller's transaction. The key and the counter are those of advisory mode: the two
exclude each other, and their tokens are in one order.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import LimitMismatch, LockTimeout, Unsupported
from holdfast.sql import TransactionRequest, in_savepoint
from holdfast.stores.postgres.advisory_sql import base_key
from holdfast.stores.postgres.schema import PostgresSchema

__all__ = ["take"]

_NOT_IN_TIME = "55P03"
# The session has the caller's search_path: every name in the SQL here is a full name.

_LOOK = """
SELECT pg_catalog.current_setting('transaction_isolation'),
  pg_catalog.to_regclass(:counter) IS NOT NULL, pg_catalog.current_setting('lock_timeout')"""

_COUNT = """
INSERT INTO @counter AS c (namespace, name, base, token, used)
  VALUES (:namespace, :name, :key, CAST(extract(epoch FROM pg_catalog.clock_timestamp())
      OPERATOR(pg_catalog.*) 1000000 AS bigint), pg_catalog.clock_timestamp())
  ON CONFLICT (namespace, name) DO UPDATE SET used = pg_catalog.clock_timestamp(), holders = '{}',
    token = greatest(c.token OPERATOR(pg_catalog.+) 1, excluded.token)
  RETURNING c.token, c.capacity, c.xmin OPERATOR(pg_catalog.=)
    CAST(pg_catalog.pg_current_xact_id() AS pg_catalog.xid)"""


async def take(driver: Any, asked: TransactionRequest) -> int:
    """Waits for the lock, counts, and returns the token. Raises ``LockTimeout`` if it is not free
    in time, and ``Unsupported`` for another isolation level or without our tables."""
    schema = PostgresSchema(asked.schema or "holdfast", asked.prefix)
    answer = await driver.execute(_LOOK, {"counter": schema.filled("@counter")})
    isolation, there, lock_timeout = answer.rows[0]
    if isolation != "read committed":
        raise Unsupported(
            f"transaction_lock({asked.name!r}) needs the isolation level read committed: with "
            f"{isolation} the transaction would read old data"
        )
    if not there:
        raise Unsupported(
            "Holdfast's tables are missing in this database: run what `holdfast schema "
            "postgresql` prints, or take any lock through a client once"
        )
    key = base_key(asked.namespace, asked.name)
    await _lock(driver, asked, key, lock_timeout)
    return await _count(driver, asked, key, schema)


async def _lock(driver: Any, asked: TransactionRequest, key: int, lock_timeout: str) -> None:
    if asked.timeout is None:
        await driver.execute("SELECT pg_catalog.pg_advisory_xact_lock(:key)", {"key": key})
        return
    answer = await driver.execute("SELECT pg_catalog.pg_try_advisory_xact_lock(:key)", {"key": key})
    if answer.rows[0][0]:
        return
    if asked.timeout <= 0 or not await _wait(driver, key, asked.timeout, lock_timeout):
        raise LockTimeout(
            f"{asked.name!r} was not locked within {asked.timeout:g} s: another transaction or "
            "session has it",
            name=asked.name,
        )


async def _wait(driver: Any, key: int, seconds: float, lock_timeout: str) -> bool:
    """Waits in a savepoint, so that the caller's transaction survives a timeout. Returns False at
    a timeout."""
    change = "SELECT pg_catalog.set_config('lock_timeout', :timeout, true)"
    await driver.execute("SAVEPOINT holdfast_wait", {})
    await driver.execute(change, {"timeout": str(max(1, int(seconds * 1000)))})
    try:
        await driver.execute("SELECT pg_catalog.pg_advisory_xact_lock(:key)", {"key": key})
    except Exception as error:
        if _state(error) != _NOT_IN_TIME:
            raise
        await driver.execute("ROLLBACK TO SAVEPOINT holdfast_wait", {})
        await driver.execute("RELEASE SAVEPOINT holdfast_wait", {})
        return False
    await driver.execute(change, {"timeout": lock_timeout})
    await driver.execute("RELEASE SAVEPOINT holdfast_wait", {})
    return True


def _state(error: BaseException) -> str:
    """Returns the server's error code, also from inside an error of SQLAlchemy."""
    return str(getattr(getattr(error, "orig", error), "sqlstate", ""))


async def _count(driver: Any, asked: TransactionRequest, key: int, schema: PostgresSchema) -> int:
    given = {"namespace": asked.namespace, "name": asked.name, "key": key}
    answer = await driver.execute(schema.filled(_COUNT), given)
    token, capacity, outermost = answer.rows[0]
    if not outermost and not asked.savepoint:
        raise in_savepoint(asked)
    if capacity:  # it was a semaphore: it can become a lock if no slot is in use
        free = await driver.execute(
            "SELECT pg_catalog.pg_try_advisory_xact_lock(:key)", {"key": key + 1}
        )
        if not free.rows[0][0]:
            raise LimitMismatch(f"{asked.name!r} is in use as a semaphore and can't be a lock")
        update = (
            "UPDATE @counter SET capacity = 0 WHERE namespace OPERATOR(pg_catalog.=) :namespace"
            " AND name OPERATOR(pg_catalog.=) :name"
        )
        await driver.execute(schema.filled(update), given)
    return int(token)

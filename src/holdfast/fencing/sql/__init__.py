"""A fence in the caller's own SQL transaction: one statement, before the first read.

    with conn.transaction():
        fencing.sql.guard(conn, "order:42", lease)
        ...  # read and write as always: one transaction, one fence

The resource's row stays locked until the transaction ends, so that a stale and a fresh holder
can't interleave. On a connection of asyncio it is awaited.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from holdfast.claim import Keys
from holdfast.core.drive import run_now
from holdfast.fencing.rule import as_fence, check_resource
from holdfast.fencing.sql.drivers import Driver, driver_of
from holdfast.fencing.sql.enter import enter
from holdfast.fencing.sql.table import make_table
from holdfast.fencing.sql.text import Statements, statements
from holdfast.sql import check_identifier

__all__ = ["TABLE", "create", "guard", "schema"]

TABLE = "holdfast_fence"


def guard(
    connection: Any,
    resource: str,
    lease: Any,
    *,
    table: str = TABLE,
    savepoint: bool = False,
    fence_keys: Keys = (),
) -> Any:
    """Lets the lease's fence enter the resource, or raises ``StaleFence``.

    Call it in a transaction, before the first read. Raises ``Unsupported`` where every statement
    is its own transaction (autocommit), for that would protect nothing. ``lease`` is a lease, a
    fence, or a fence's text; with ``fence_keys`` what is not a lease must be signed by one.

    ``table`` is where fences are remembered. Without a schema it is ``public.`` on PostgreSQL and
    ``main.`` on SQLite, whatever the search_path or the attached databases are; MySQL takes the
    connection's database. Raises ``Unsupported`` if a second table of that name is found.

    Call it outside of savepoints (nested transactions): a rollback to an open savepoint takes back
    what was remembered, on PostgreSQL also the lock of the row, while the transaction goes on
    without a fence. Raises ``Unsupported`` where the driver reports it: on PostgreSQL, and with
    SQLAlchemy's ``begin_nested``. ``savepoint=True`` allows it.

    >>> import sqlite3, holdfast
    >>> conn = sqlite3.connect(":memory:")
    >>> with holdfast.connect("memory://") as locks:
    ...     with locks.lock("order:42") as lease, conn:
    ...         guard(conn, "order:42", lease)
    >>> conn.close()
    """
    fence = as_fence(lease, fence_keys)
    check_resource(resource)
    driver, asked = _asked(connection, table)
    return _drive(driver, enter(driver, asked, resource, fence, savepoint))


def create(connection: Any, *, table: str = TABLE) -> Any:
    """Makes the table of fences if it is missing; the caller commits.

    ``guard`` does so on first use, except on MySQL, where it would end the transaction. On MySQL it
    also upgrades a table that an older version has made.
    """
    driver, asked = _asked(connection, table)
    return _drive(driver, make_table(driver, asked))


def schema(dialect: str, *, table: str = TABLE) -> str:
    """The SQL that makes the table, for ``postgresql``, ``mysql`` or ``sqlite``.

    >>> "CREATE TABLE IF NOT EXISTS public.holdfast_fence" in schema("postgresql")
    True
    """
    return statements(dialect, _table(table)).create.strip() + ";\n"


def _asked(connection: Any, table: str) -> tuple[Driver, Statements]:
    driver = driver_of(connection)
    return driver, statements(driver.dialect, _table(table))


def _drive(driver: Driver, work: Coroutine[Any, Any, None]) -> Any:
    return work if driver.asynchronous else run_now(work)


def _table(table: str) -> str:
    parts = table.split(".")
    if len(parts) > 2:
        raise ValueError(f"table={table!r}: a table's name, or a schema's and a table's")
    return ".".join(check_identifier(part, "table") for part in parts)

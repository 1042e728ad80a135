"""The connections that ``fencing.sql`` takes: psycopg, PyMySQL, asyncmy, sqlite3, SQLAlchemy.

They are known by the package of their type; nothing is imported that is not installed.
All have the same interface; a blocking driver never suspends.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol

__all__ = ["Answer", "Driver", "driver_of"]

_PARAMETER = re.compile(r":([a-z]+)")


class Answer(NamedTuple):
    """What a statement gave."""

    rows: list[tuple[Any, ...]]
    changed: int
    """How many rows were written, or came back."""
    inserted: int
    """MySQL's LAST_INSERT_ID, as the OK packet carries it; 0 if there is none."""


class Driver(Protocol):
    """A connection with a transaction of the caller's."""

    dialect: str
    asynchronous: bool
    shares: bool
    """Whether readers can be let in beside each other."""

    async def begin(self, write: bool) -> None:
        """Begins the transaction, where the driver would not do so in time."""
        ...

    async def execute(self, sql: str, parameters: Mapping[str, Any]) -> Answer:
        """Runs a statement with ``:name`` parameters in the caller's transaction."""
        ...

    async def autocommit(self) -> bool:
        """Whether there is no transaction, and none would begin with the next statement."""
        ...

    async def begun(self) -> bool:
        """Of MySQL: whether the transaction has begun before, so that it may have read."""
        ...

    def place(self) -> Hashable:
        """Which database this is; ``None`` where that is unknown."""
        ...

    def in_savepoint(self) -> bool:
        """Whether the driver knows of a savepoint that is open; PostgreSQL reports one, too."""
        ...


def _percent(sql: str) -> str:
    return _PARAMETER.sub(r"%(\1)s", sql)


class Psycopg:
    """``psycopg.Connection`` and ``AsyncConnection``."""

    dialect = "postgresql"
    shares = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.asynchronous = hasattr(connection, "__aenter__")

    async def begin(self, write: bool) -> None:
        pass

    async def execute(self, sql: str, parameters: Mapping[str, Any]) -> Answer:
        from psycopg.rows import tuple_row

        cursor = self._connection.cursor(row_factory=tuple_row)
        text = _percent(sql) if parameters else sql
        done = cursor.execute(text, parameters or None)
        if self.asynchronous:
            await done
        rows: list[tuple[Any, ...]] = []
        if "SELECT" in sql or "RETURNING" in sql:
            fetched = cursor.fetchall()
            rows = (await fetched) if self.asynchronous else fetched
        closed = cursor.close()
        if self.asynchronous:
            await closed
        return Answer(rows, len(rows), 0)

    async def autocommit(self) -> bool:
        idle = int(self._connection.info.transaction_status) == 0  # libpq's PQTRANS_IDLE
        return idle and bool(self._connection.autocommit)

    async def begun(self) -> bool:
        return False  # not asked for

    def place(self) -> Hashable:
        info = self._connection.info
        return info.host, info.hostaddr, info.port, info.dbname, info.user

    def in_savepoint(self) -> bool:
        return False


class PyMySQL:
    """``pymysql.Connection``."""

    dialect = "mysql"
    asynchronous = False
    shares = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def begin(self, write: bool) -> None:
        pass

    async def execute(self, sql: str, parameters: Mapping[str, Any]) -> Answer:
        from pymysql.cursors import Cursor

        with self._connection.cursor(Cursor) as cursor:
            changed = cursor.execute(_percent(sql), parameters or None)
            return Answer(list(cursor.fetchall()), changed, cursor.lastrowid or 0)

    async def autocommit(self) -> bool:
        in_transaction = self._connection.server_status & 1  # SERVER_STATUS_IN_TRANS
        return bool(self._connection.get_autocommit()) and not in_transaction

    async def begun(self) -> bool:
        if not self._connection.server_status & 1:
            # PyMySQL does not read the status behind rows: a ping brings it.
            pinged = self._connection.ping(reconnect=False)
            if self.asynchronous:
                await pinged
        return bool(self._connection.server_status & 1)

    def place(self) -> Hashable:
        return None

    def in_savepoint(self) -> bool:
        return False


class Asyncmy(PyMySQL):
    """``asyncmy``'s connections, also those of its pool."""

    asynchronous = True

    async def execute(self, sql: str, parameters: Mapping[str, Any]) -> Answer:
        from asyncmy.cursors import Cursor

        async with self._connection.cursor(Cursor) as cursor:
            changed = await cursor.execute(_percent(sql), parameters or None)
            rows = list(await cursor.fetchall()) if cursor.description else []
            return Answer(rows, changed, cursor.lastrowid or 0)


class Sqlite:
    """``sqlite3.Connection``."""

    dialect = "sqlite"
    asynchronous = False
    shares = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def begin(self, write: bool) -> None:
        # By itself sqlite3 begins before a write only, and not with what makes a writer wait.
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")

    async def execute(self, sql: str, parameters: Mapping[str, Any]) -> Answer:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        cursor.execute(sql, parameters)
        rows = cursor.fetchall()
        changed = cursor.rowcount
        cursor.close()
        return Answer(rows, changed, 0)

    async def autocommit(self) -> bool:
        # Python 3.12 has a newer way to say it; -1 there is the older one.
        newer = getattr(self._connection, "autocommit", -1)
        silent = self._connection.isolation_level is None if newer == -1 else newer is True
        return silent and not self._connection.in_transaction

    async def begun(self) -> bool:
        return False  # not asked for

    def place(self) -> Hashable:
        return None

    def in_savepoint(self) -> bool:
        return False


class SQLAlchemy:
    """SQLAlchemy 2: ``Connection`` and ``Session``, and the two of ``sqlalchemy.ext.asyncio``.

    Of a ``scoped_session`` (``db.session`` of Flask-SQLAlchemy) this is the session behind it.
    """

    def __init__(self, connection: Any, session: bool, asynchronous: bool) -> None:
        self._given, self._session, self.asynchronous = connection, session, asynchronous
        bind = connection.get_bind() if session else connection
        self.dialect = bind.dialect.name
        # Under SQLAlchemy a transaction of SQLite begins with its first write only.
        self.shares = self.dialect != "sqlite"
        self._connection: Any = None

    async def _connected(self) -> Any:
        if self._connection is None:
            found = self._given.connection() if self._session else self._given
            self._connection = await found if self._session and self.asynchronous else found
        return self._connection

    async def begin(self, write: bool) -> None:
        pass

    async def execute(self, sql: str, parameters: Mapping[str, Any]) -> Answer:
        from sqlalchemy import text

        connection = await self._connected()
        done = connection.execute(text(sql), dict(parameters))
        result = await done if self.asynchronous else done
        if result.returns_rows:
            rows = [tuple(row) for row in result.all()]
            return Answer(rows, len(rows), 0)
        inserted = result.lastrowid if self.dialect in ("mysql", "mariadb") else 0
        return Answer([], result.rowcount, inserted or 0)

    async def autocommit(self) -> bool:
        connection = await self._connected()
        plain = connection.sync_connection if self.asynchronous else connection
        level = plain.get_execution_options().get("isolation_level")
        if level is None:
            level = getattr(plain.dialect, "_on_connect_isolation_level", None)
        if level == "AUTOCOMMIT":
            return True
        try:  # it may also have been set behind SQLAlchemy's back
            return await driver_of(plain.connection.driver_connection).autocommit()
        except TypeError:
            return False

    async def begun(self) -> bool:
        connection = await self._connected()
        plain = connection.sync_connection if self.asynchronous else connection
        try:
            return await driver_of(plain.connection.driver_connection).begun()
        except TypeError:  # a driver that can't tell
            return True

    def place(self) -> Hashable:
        return str(self._connection.engine.url) if self.dialect == "postgresql" else None

    def in_savepoint(self) -> bool:
        return bool(self._given.in_nested_transaction())


def driver_of(connection: Any) -> Driver:
    """Returns the driver; raises ``TypeError`` that names the supported ones."""
    for kind in type(connection).__mro__:
        package = kind.__module__.partition(".")[0]
        if package == "psycopg" and hasattr(connection, "cursor"):
            return Psycopg(connection)
        if package == "pymysql" and hasattr(connection, "get_autocommit"):
            return PyMySQL(connection)
        if package == "asyncmy" and hasattr(connection, "get_autocommit"):
            return Asyncmy(connection)
        if package == "sqlite3" and hasattr(connection, "in_transaction"):
            return Sqlite(connection)
        if package == "sqlalchemy" and hasattr(connection, "execute"):
            asynchronous = ".asyncio" in kind.__module__
            if hasattr(connection, "registry"):  # a scoped_session: the session of this thread
                connection = connection()
            return SQLAlchemy(connection, hasattr(connection, "get_bind"), asynchronous)
    raise TypeError(
        "a guard takes a connection of psycopg, PyMySQL, asyncmy or sqlite3, or a Connection or "
        f"Session of SQLAlchemy; not {type(connection).__module__}.{type(connection).__qualname__}"
    )

"""The table of fences: made on first use, in the caller's transaction where that is possible."""

from __future__ import annotations

from collections.abc import Hashable

from holdfast.errors import Unsupported
from holdfast.fencing.sql.drivers import Driver
from holdfast.fencing.sql.text import Statements

__all__ = ["ensure_table", "forget_table", "is_deadlock", "is_missing", "make_table", "refused"]

CREATION_KEY = 7_019_267_233_085_447_001
"""Two that create at once in PostgreSQL: one waits for the other."""
NO_SUCH_TABLE = 1146
NO_SUCH_COLUMN = 1054
SUCH_A_COLUMN = 1060
DEADLOCK = 1213
NO_RIGHTS = (1142, "42501")
"""What MySQL and PostgreSQL say where an account lacks a right on a table."""

_present: set[Hashable] = set()
"""Databases in which the table was seen."""


async def ensure_table(driver: Driver, asked: Statements) -> None:
    """PostgreSQL: creates a missing table first; a failed statement aborts the transaction."""
    if asked.dialect != "postgresql":
        return
    place = driver.place(), asked.create
    if place in _present:
        return
    if await _find(driver, asked):
        _present.add(place)
    else:
        await make_table(driver, asked)  # a rollback takes it away again: not noted yet


async def _find(driver: Driver, asked: Statements) -> bool:
    """Whether the table is there; raises ``Unsupported`` if another one may be in use."""
    rows = (await driver.execute(asked.found, {})).rows
    there = any(ours for _, ours, _ in rows)
    others = [str(schema) for schema, ours, near in rows if not ours and (near or not there)]
    if others:
        raise _second(asked, others, there)
    return there


async def _find_attached(driver: Driver, asked: Statements) -> None:
    """In SQLite, where the main database has no table of fences: does another one?"""
    schema, _, name = asked.table.partition(".")
    rows = (await driver.execute("SELECT name FROM pragma_database_list", {})).rows
    for (other,) in rows if schema == "main" else ():
        quoted = '"' + str(other).replace('"', '""') + '"'
        look = f"SELECT 1 FROM {quoted}.sqlite_master WHERE name = :name"  # noqa: S608
        if other != "main" and (await driver.execute(look, {"name": name})).rows:
            raise _second(asked, [str(other)], False)


def _second(asked: Statements, schemas: list[str], there: bool) -> Unsupported:
    name = asked.table.rpartition(".")[2]
    others = ", ".join(f"{schema}.{name}" for schema in schemas)
    missing = "" if there else ", which is missing,"
    own = f". If it is not yours, make this one: fencing.sql.create(…, table={asked.table!r})"
    if there or asked.dialect != "postgresql":
        own = ""
    return Unsupported(
        f"fences are remembered in the table {asked.table}{missing} but there is also {others}: "
        "programs that use different tables would let a stale holder in. Keep one of them, for "
        f"all programs: name it (table={schemas[0] + '.' + name!r}), or move its rows to "
        f"{asked.table} and drop it{own}"
    )


async def make_table(driver: Driver, asked: Statements) -> None:
    """Creates the table, or adds missing columns to an older one. Idempotent."""
    if asked.dialect == "postgresql":
        await _find(driver, asked)
    elif asked.dialect == "sqlite":
        await _find_attached(driver, asked)
    try:
        if asked.dialect == "postgresql":
            lock = f"SELECT pg_catalog.pg_advisory_xact_lock({CREATION_KEY})"
            await driver.execute(lock, {})
        await driver.execute(asked.create, {})
    except Exception as error:
        raise Unsupported(
            f"the table of fences is missing, and this account can't make it ({_words(error)}). "
            f"Let a user who may create tables run\n{asked.create};\n{_grant(asked)}"
            f"{_elsewhere(asked)}"
        ) from error
    if asked.renew:
        await _renew(driver, asked)


async def _renew(driver: Driver, asked: Statements) -> None:
    """Gives a table of MySQL's that an older version has made what it lacks."""
    try:
        await driver.execute(asked.newest, {})
        return
    except Exception as error:
        if _code(asked, error) != NO_SUCH_COLUMN:
            raise
        older = refused(asked, error)
    try:
        await driver.execute(asked.renew, {})
    except Exception as error:
        if _code(asked, error) != SUCH_A_COLUMN:  # another one was faster
            raise older or error from error


def forget_table(driver: Driver, asked: Statements) -> None:
    """A statement has failed: the table may have been dropped, or rolled back after all."""
    _present.discard((driver.place(), asked.create))


def is_missing(asked: Statements, error: Exception) -> bool:
    """Whether this is SQLite's word for a missing table, where one can be made."""
    return asked.dialect == "sqlite" and str(_cause(error)).startswith("no such table")


def is_deadlock(asked: Statements, error: Exception) -> bool:
    """Whether MySQL has rolled back the transaction to end a deadlock. It does so to all but one
    that wait for a new row if the transaction that made the row is rolled back."""
    return asked.dialect == "mysql" and _code(asked, error) == DEADLOCK


def refused(asked: Statements, error: Exception) -> Unsupported | None:
    """What to do about the table where a statement has failed because of it; else nothing."""
    code = _code(asked, error)
    if code in NO_RIGHTS:
        return Unsupported(
            f"this account may not use the table of fences ({_words(error)}): let its owner run\n"
            f"{_grant(asked)}"
        )
    if asked.dialect != "mysql" or code not in (NO_SUCH_TABLE, NO_SUCH_COLUMN):
        return None
    if code == NO_SUCH_TABLE:
        what, does = "is missing", asked.create
    else:
        what, does = "was made by an older version of Holdfast, and lacks a column", asked.renew
    return Unsupported(
        f"the table of fences {what}: run fencing.sql.create(connection) once, before the "
        f"transaction (in MySQL changing tables ends it), or let a DBA run\n{does}"
    )


def _grant(asked: Statements) -> str:
    if asked.dialect == "sqlite":
        return ""
    rights = "SELECT, INSERT, UPDATE" + (", DELETE" if asked.dialect == "mysql" else "")
    return f"GRANT {rights} ON {asked.table} TO your_account;"


def _elsewhere(asked: Statements) -> str:
    if asked.dialect != "postgresql":
        return ""
    name = asked.table.rpartition(".")[2]
    return (
        "\nOr name a schema in which this account may create tables, the same in all programs: "
        f"table='your_schema.{name}'"
    )


def _cause(error: BaseException) -> BaseException:
    return getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's


def _code(asked: Statements, error: BaseException) -> object:
    """The server's word for what is wrong: a number on MySQL, five characters on PostgreSQL."""
    cause = _cause(error)
    if asked.dialect == "mysql":
        return next(iter(cause.args), None)
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def _words(error: BaseException) -> str:
    return str(_cause(error)).partition("\n")[0]

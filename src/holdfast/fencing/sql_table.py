"""The table of fences: made on first use, in the caller's transaction where that is possible."""

from __future__ import annotations

from collections.abc import Hashable

from holdfast.errors import Unsupported
from holdfast.fencing.sql_drivers import Driver
from holdfast.fencing.sql_text import Statements

__all__ = ["ensure_table", "forget_table", "is_missing", "make_table", "no_table"]

CREATION_KEY = 7_019_267_233_085_447_001
"""Two that create at once in PostgreSQL: one waits for the other."""
NO_SUCH_TABLE = 1146

_present: set[Hashable] = set()
"""Databases in which the table was seen."""


async def ensure_table(driver: Driver, asked: Statements) -> None:
    """In PostgreSQL a statement that fails takes the transaction with it: looked at before."""
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
    return Unsupported(
        f"fences are remembered in the table {asked.table}{missing} but there is also {others}: "
        "programs that use different tables would let a stale holder in. Keep one of them, for "
        f"all programs: name it (table={schemas[0] + '.' + name!r}), or move its rows to "
        f"{asked.table} and drop it"
    )


async def make_table(driver: Driver, asked: Statements) -> None:
    """Makes the table; running it again changes nothing."""
    if asked.dialect == "postgresql":
        await _find(driver, asked)
    elif asked.dialect == "sqlite":
        await _find_attached(driver, asked)
    try:
        if asked.dialect == "postgresql":
            await driver.execute(f"SELECT pg_advisory_xact_lock({CREATION_KEY})", {})
        await driver.execute(asked.create, {})
    except Exception as error:
        raise Unsupported(
            f"the table of fences is missing and could not be made ({error}): let somebody who may "
            f"create tables run what fencing.sql.schema({asked.dialect!r}) gives, which is\n"
            f"{asked.create}"
        ) from error


def forget_table(driver: Driver, asked: Statements) -> None:
    """A statement has failed: the table may have been dropped, or rolled back after all."""
    _present.discard((driver.place(), asked.create))


def is_missing(asked: Statements, error: Exception) -> bool:
    """Whether this is MySQL's or SQLite's word for a missing table."""
    cause = getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's
    if asked.dialect == "mysql":
        return cause.args[:1] == (NO_SUCH_TABLE,)
    return asked.dialect == "sqlite" and str(cause).startswith("no such table")


def no_table(asked: Statements) -> Unsupported:
    """What to do where making the table would end the transaction."""
    return Unsupported(
        "the table of fences is missing: run fencing.sql.create(connection) once, before the "
        f"transaction (in MySQL making a table ends it), or let a DBA run\n{asked.create}"
    )

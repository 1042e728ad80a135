"""The statements of ``fencing.sql``, for each database.

One row per resource, and for a semaphore one per slot of it. A statement compares and writes in
one step and keeps the row locked until the transaction ends; it says the same as
``fencing.rule``. Parameters are written ``:name``, comparisons ``[=]``: for PostgreSQL they become
``OPERATOR(pg_catalog.=)``, since the caller's search_path may find another role's operator first.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["DIALECTS", "Statements", "statements"]

LOCK_ROW = -1
"""The row of a resource that a lock guards; a semaphore's rows have its slots' numbers."""


class Statements(NamedTuple):
    """What is asked of one database."""

    dialect: str
    table: str
    """Its full name: where it is does not depend on a session's settings."""
    create: str
    found: str
    """Selects the schema of every table of that name, whether it is ours, and whether it would be
    found without its schema; those first. PostgreSQL's only: elsewhere failing is harmless."""
    write: str
    """Lets an exclusive fence, or one of a slot, enter."""
    read: str
    """Lets a shared fence enter."""
    share: str
    """Finds and share-locks the row if a shared fence has entered before."""
    own: str
    """What the row remembers that has refused a fence."""
    other: str
    """A row by which the resource is another lock's, or this one's in its other kind."""
    lock: str = ""
    """MySQL's only: locks the row, makes it if missing, and lets no fence enter."""
    seen: str = ""
    """MySQL's only: how many had entered when the transaction began to read."""
    unmake: str = ""
    """MySQL's only: takes away a row that was made for another lock."""
    newest: str = ""
    """MySQL's only: fails for a table that an older version has made."""
    renew: str = ""
    """MySQL's only: gives such a table what it lacks, and leaves it usable for that version."""


_COLUMNS = "resource, slot, name, epoch, token, highest_epoch, highest_token"

_SHARE = """
SELECT name, epoch, token FROM {table} WHERE resource [=] :resource AND slot [=] :slot
AND (highest_epoch [>] :epoch OR (highest_epoch [=] :epoch AND highest_token [>=] :token))"""

_OWN = """
SELECT slot, name, epoch, token, highest_epoch, highest_token
FROM {table} WHERE resource [=] :resource AND slot [=] :slot"""

_OTHER = """
SELECT slot, name, epoch, token, highest_epoch, highest_token
FROM {table} WHERE resource [=] :resource
AND (name [<>] :name OR (slot [<] 0) [<>] (:slot [<] 0))
ORDER BY slot LIMIT 1"""

_POSTGRESQL_CREATE = """
CREATE TABLE IF NOT EXISTS {table} (
  resource pg_catalog.text COLLATE pg_catalog."C" NOT NULL,
  slot bigint NOT NULL,
  name pg_catalog.text COLLATE pg_catalog."C" NOT NULL,
  epoch bigint NOT NULL,
  token bigint NOT NULL,
  highest_epoch bigint NOT NULL,
  highest_token bigint NOT NULL,
  PRIMARY KEY (resource, slot)
)"""

# Temporary tables of other sessions are invisible here. Where the schema was given, no other
# schema is searched.
_POSTGRESQL_FOUND = """
SELECT n.nspname, n.nspname OPERATOR(pg_catalog.=) '{schema}',
  n.nspname OPERATOR(pg_catalog.=) ANY (pg_catalog.current_schemas(true))
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n
  ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
WHERE c.relname OPERATOR(pg_catalog.=) '{name}'
  AND c.relkind OPERATOR(pg_catalog.=) ANY ('{{r,p,v,m,f}}')
  AND (n.oid OPERATOR(pg_catalog.=) pg_catalog.pg_my_temp_schema()
    OR NOT pg_catalog.starts_with(n.nspname, 'pg_temp_'))
  AND {others}
ORDER BY 3 DESC, 1"""

_SQLITE_CREATE = """
CREATE TABLE IF NOT EXISTS {table} (
  resource TEXT NOT NULL,
  slot INTEGER NOT NULL,
  name TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  token INTEGER NOT NULL,
  highest_epoch INTEGER NOT NULL,
  highest_token INTEGER NOT NULL,
  PRIMARY KEY (resource, slot)
)"""

# Names are bytes: text of MySQL ignores trailing blanks, and often case and accents.
_MYSQL_CREATE = """
CREATE TABLE IF NOT EXISTS {table} (
  resource VARBINARY(512) NOT NULL,
  slot BIGINT NOT NULL,
  name VARBINARY(512) NOT NULL,
  epoch BIGINT NOT NULL,
  token BIGINT NOT NULL,
  highest_epoch BIGINT NOT NULL,
  highest_token BIGINT NOT NULL,
  entries BIGINT NOT NULL,
  PRIMARY KEY (resource, slot)
) ENGINE=InnoDB"""

# The resource is another lock's, or this one's in its other kind: seen where a row is made.
_OTHERS = """NOT EXISTS (SELECT 1 FROM {table} other WHERE other.resource [=] {resource}
  AND (other.name [<>] {name} OR (other.slot [<] 0) [<>] ({slot} [<] 0)))"""

# PostgreSQL and SQLite share the upsert; the types are for PostgreSQL, SQLite takes them too.
_UPSERT = (
    """
INSERT INTO {table} AS kept ("""
    + _COLUMNS
    + """)
SELECT {resource}, {slot}, {name}, {writer}, {epoch}, {token} WHERE """
    + _OTHERS
    + """
ON CONFLICT (resource, slot) DO UPDATE SET """
)

_WRITE = (
    _UPSERT
    + """
  epoch = excluded.epoch, token = excluded.token,
  highest_epoch = excluded.highest_epoch, highest_token = excluded.highest_token
WHERE kept.name [=] excluded.name
  AND (kept.highest_epoch, kept.highest_token) [<=] (excluded.epoch, excluded.token)"""
)

_READ = (
    _UPSERT
    + """
  highest_epoch = CASE WHEN (kept.highest_epoch, kept.highest_token)
    [<] (excluded.highest_epoch, excluded.highest_token)
    THEN excluded.highest_epoch ELSE kept.highest_epoch END,
  highest_token = CASE WHEN (kept.highest_epoch, kept.highest_token)
    [<] (excluded.highest_epoch, excluded.highest_token)
    THEN excluded.highest_token ELSE kept.highest_token END
WHERE kept.name [=] excluded.name
  AND (kept.epoch, kept.token) [<=] (excluded.highest_epoch, excluded.highest_token)"""
)

_OPERATOR = re.compile(r"\[([<>=]+)\]")
_TYPED = {
    "resource": "CAST(:resource AS {text})",
    "name": "CAST(:name AS {text})",
    "slot": "CAST(:slot AS bigint)",
    "epoch": "CAST(:epoch AS bigint)",
    "token": "CAST(:token AS bigint)",
}
# What comes back is asked for: a pipeline of psycopg's does not count rows. A row that is written
# inside a savepoint has the savepoint's own transaction id.
_ENTERED = """
RETURNING kept.xmin OPERATOR(pg_catalog.=)
  CAST(pg_catalog.pg_current_xact_id() AS pg_catalog.xid)"""
_WRITER = {"writer": f"{_TYPED['epoch']}, {_TYPED['token']}"}
_READER = {"writer": "CAST(-1 AS bigint), CAST(-1 AS bigint)"}

# The verdict travels in the OK packet: 1 entered, 2 refused, 0 a new row. Assignments are made
# from left to right and see what was assigned before them, or (MariaDB's SIMULTANEOUS_ASSIGNMENT,
# which ORACLE mode has) see the row as it was. ``enters`` tells the same either way: what it looks
# at only ever changes to the fence that it compares with. Every entry changes the row, also one
# that says nothing new: Galera certifies only what was changed.
_MYSQL_INSERT = (
    """
INSERT INTO {table} ("""
    + _COLUMNS
    + """, entries)
VALUES (:resource, :slot, :name, {stamps}, 1)
ON DUPLICATE KEY UPDATE """
)

_MYSQL_UPSERT = (
    _MYSQL_INSERT
    + """entries = entries + (LAST_INSERT_ID(IF({enters}, 1, 2)) = 1),
"""
)

_MYSQL_WRITE = (
    _MYSQL_UPSERT
    + """  epoch = IF({enters}, :epoch, epoch), token = IF({enters}, :token, token),
  highest_token = IF({enters}, :token, highest_token),
  highest_epoch = IF({enters}, :epoch, highest_epoch)"""
)

_MYSQL_READ = (
    _MYSQL_UPSERT
    + """  highest_token = IF({enters} AND (highest_epoch < :epoch
    OR (highest_epoch = :epoch AND highest_token < :token)), :token, highest_token),
  highest_epoch = IF({enters}, GREATEST(highest_epoch, :epoch), highest_epoch)"""
)

_ENTERS = """name = :name AND ({kept}epoch < :epoch
    OR ({kept}epoch = :epoch AND {kept}token <= :token))"""
_WRITES = {"stamps": ":epoch, :token, :epoch, :token", "enters": _ENTERS.format(kept="highest_")}
_READS = {"stamps": "-1, -1, :epoch, :token", "enters": _ENTERS.format(kept="")}

# Answers how many have entered, 0 for a new row, and changes nothing.
_MYSQL_LOCK = _MYSQL_INSERT + "entries = entries + 0 * LAST_INSERT_ID(entries)"
_MYSQL_SEEN = "SELECT entries FROM {table} WHERE resource = :resource AND slot = :slot"
_MYSQL_UNMAKE = "DELETE FROM {table} WHERE resource = :resource AND slot = :slot"
_MYSQL_NEWEST = "SELECT entries FROM {table} LIMIT 0"
_MYSQL_RENEW = """
ALTER TABLE {table} ADD COLUMN entries BIGINT NOT NULL DEFAULT 1,
  ALTER COLUMN verdict SET DEFAULT 0"""
_MYSQL_SHARE = _SHARE.replace("token FROM", "token, entries FROM") + " LOCK IN SHARE MODE"


def _postgresql(table: str) -> Statements:
    schema, given, name = table.rpartition(".")
    schema = schema or "public"
    table = f"{schema}.{name}"
    names = _names(table, "pg_catalog.text")
    others = f"n.nspname OPERATOR(pg_catalog.=) '{schema}'" if given else "true"
    return Statements(
        "postgresql",
        table,
        _POSTGRESQL_CREATE.format(table=table),
        _POSTGRESQL_FOUND.format(schema=schema, name=name, others=others),
        _in_full(_WRITE.format(**names, **_WRITER) + _ENTERED),
        _in_full(_READ.format(**names, **_READER) + _ENTERED),
        _in_full(_SHARE.format(table=table) + " FOR SHARE"),
        _in_full(_OWN.format(table=table)),
        _in_full(_OTHER.format(table=table)),
    )


def _names(table: str, text: str) -> dict[str, str]:
    return {"table": table, **{word: cast.format(text=text) for word, cast in _TYPED.items()}}


def _in_full(sql: str) -> str:
    return _OPERATOR.sub(r"OPERATOR(pg_catalog.\1)", sql)


def _plain(sql: str) -> str:
    return _OPERATOR.sub(r"\1", sql)


def _sqlite(table: str) -> Statements:
    table = table if "." in table else f"main.{table}"
    names = _names(table, "text")
    return Statements(
        "sqlite",
        table,
        _SQLITE_CREATE.format(table=table),
        "",
        _plain(_WRITE.format(**names, **_WRITER)),
        _plain(_READ.format(**names, **_READER)),
        _plain(_SHARE.format(table=table)),
        _plain(_OWN.format(table=table)),
        _plain(_OTHER.format(table=table)),
    )


def _mysql(table: str) -> Statements:
    return Statements(
        "mysql",
        table,
        _MYSQL_CREATE.format(table=table),
        "",
        _from_hex(_MYSQL_WRITE.format(table=table, **_WRITES)),
        _from_hex(_MYSQL_READ.format(table=table, **_READS)),
        _from_hex(_MYSQL_SHARE.format(table=table)),
        # It is locked already; this sees it as it is.
        _from_hex(_OWN.format(table=table) + " FOR UPDATE"),
        _from_hex(_OTHER.format(table=table)),
        _from_hex(_MYSQL_LOCK.format(table=table, stamps="-1, -1, -1, -1")),
        _from_hex(_MYSQL_SEEN.format(table=table)),
        _from_hex(_MYSQL_UNMAKE.format(table=table)),
        _MYSQL_NEWEST.format(table=table),
        _MYSQL_RENEW.format(table=table),
    )


def _from_hex(sql: str) -> str:
    """Takes texts as hexadecimal digits, which no session can take for the end of a literal.

    What a driver puts between quotes is safe only under the SQL mode and the character set that
    it counts on. asyncmy counts on backslashes, also where the session has none.
    """
    return re.sub(r":(resource|name)\b", r"UNHEX(:\1)", _plain(sql))


DIALECTS = {"postgresql": _postgresql, "mysql": _mysql, "mariadb": _mysql, "sqlite": _sqlite}


def statements(dialect: str, table: str) -> Statements:
    """What is asked of a database of this kind; raises ``ValueError`` for an unknown one."""
    if dialect not in DIALECTS:
        raise ValueError(f"no guard for {dialect!r}: there are {', '.join(DIALECTS)}")
    return DIALECTS[dialect](table)

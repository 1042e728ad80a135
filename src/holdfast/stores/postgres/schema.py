"""What Holdfast stores in PostgreSQL: the script that makes its tables and functions.

``connect`` runs it if the first connection finds nothing. ``schema_sql`` returns the same text for
a database where our role may not create tables. This module needs no PostgreSQL client library.

One script makes the tables of both modes (``sql``, ``advisory_sql``): ``transaction_lock`` uses
the counters of advisory mode beside lease rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.core.contract import GRACE_SECONDS, IDLE_COUNTER_SECONDS, QUEUE_CAP, STALE_SECONDS
from holdfast.sql import check_identifier
from holdfast.stores._sql.purge import POSITION
from holdfast.stores.postgres.advisory_sql import ADVISORY
from holdfast.stores.postgres.sql import (
    LEASE_ADMISSION,
    LEASE_KEEPING,
    LEASE_LOOK,
    LEASE_TABLES,
)

__all__ = [
    "PROTOCOL",
    "REVISION",
    "SAFE_PATH",
    "Parameters",
    "PostgresSchema",
    "Request",
    "SharedStatements",
    "Statement",
    "schema_sql",
]

PROTOCOL = 1
"""Grows when two versions can no longer exclude each other. Stored for every namespace."""
REVISION = 11
"""Grows with every change of the functions that older versions are compatible with."""
_WORDS = {
    "cap": str(QUEUE_CAP),
    "fresh": "(q.reserved IS NULL OR q.reserved >= moment)"
    f" AND q.refreshed >= moment - interval '{STALE_SECONDS} s'",
    "grace": str(GRACE_SECONDS),
    "highest": "CASE current_setting('server_encoding') WHEN 'UTF8' THEN 1114111 ELSE 255 END",
    "idle": str(IDLE_COUNTER_SECONDS),
    "position": f"chr(1) || '{POSITION[1:]}'",
    "revision": str(REVISION),
    "stale": str(STALE_SECONDS),
}
SAFE_PATH = "pg_catalog, pg_temp"
"""The search_path of every function: it contains nothing that another role has made."""
# A procedure that commits can't be made with a search_path: it sets one itself.
_FUNCTION = re.compile(r"(CREATE OR REPLACE FUNCTION .*?LANGUAGE \w+) AS ", re.DOTALL)
# The types and functions that the script itself names are looked up in the same safe way. At the
# end the script restores the search_path of the session.
_BEGIN = f"""SELECT pg_catalog.set_config('holdfast.search_path',
  pg_catalog.current_setting('search_path'), false);
SELECT pg_catalog.set_config('search_path', '{SAFE_PATH}', false);
"""
_END = """
SELECT pg_catalog.set_config('search_path',
  pg_catalog.current_setting('holdfast.search_path'), false);
"""

_COMMON = """
CREATE TABLE IF NOT EXISTS @protocol (
  namespace text COLLATE "C" PRIMARY KEY,
  version integer NOT NULL,
  mode text NOT NULL
);

CREATE TABLE IF NOT EXISTS @record (
  namespace text COLLATE "C" NOT NULL,
  name text COLLATE "C" NOT NULL,
  value text NOT NULL,
  token bigint NOT NULL,
  written timestamptz NOT NULL,
  expires timestamptz NOT NULL,
  PRIMARY KEY (namespace, name)
);
CREATE INDEX IF NOT EXISTS "%prefix%record_expires" ON @record (namespace, expires);

-- Called first by every connection. A namespace belongs to one mode: locks of different modes would
-- not exclude each other.
CREATE OR REPLACE FUNCTION @enter(ns text, md text, ver integer) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  kept record;
BEGIN
  FOR i IN 1 .. 3 LOOP
    SELECT p.version, p.mode INTO kept FROM @protocol p WHERE p.namespace = ns;
    EXIT WHEN FOUND;
    INSERT INTO @protocol (namespace, version, mode) VALUES (ns, ver, md) ON CONFLICT DO NOTHING;
  END LOOP;
  RETURN %revision% || ' ' || kept.version || ' ' || kept.mode;
END $$;

CREATE OR REPLACE FUNCTION @keep_record(
  ns text, nm text, val text, fence bigint, keep float8) RETURNS void
LANGUAGE sql AS $$
  INSERT INTO @record (namespace, name, value, token, written, expires)
    VALUES (ns, nm, val, fence, clock_timestamp(),
            clock_timestamp() + make_interval(secs => least(keep, 3e9)))
    ON CONFLICT (namespace, name) DO UPDATE SET value = excluded.value, token = excluded.token,
      written = excluded.written, expires = excluded.expires;
$$;

CREATE OR REPLACE FUNCTION @purge_records(ns text, batch integer) RETURNS void
LANGUAGE sql AS $$
  DELETE FROM @record r WHERE (r.namespace, r.name) IN (
    SELECT o.namespace, o.name FROM @record o
    WHERE o.namespace = ns AND o.expires < clock_timestamp()
    ORDER BY o.expires LIMIT batch FOR UPDATE SKIP LOCKED);
$$;

-- How far the purge of a table has come: the last name that was checked, empty at the end.
CREATE OR REPLACE FUNCTION @purged_to(ns text, tab text) RETURNS text
LANGUAGE sql AS $$
  SELECT coalesce((SELECT r.value FROM @record r
    WHERE r.namespace = ns AND r.name = %position% || tab), '');
$$;

CREATE OR REPLACE FUNCTION @recall(ns text, nm text)
RETURNS TABLE (value text, token bigint, age numeric) LANGUAGE sql AS $$
  SELECT r.value, r.token, extract(epoch FROM clock_timestamp() - r.written)
  FROM @record r WHERE r.namespace = ns AND r.name = nm AND r.expires > clock_timestamp();
$$;
"""


class Statement(NamedTuple):
    """An SQL statement whose parameters come with each use. Frequent ones are prepared by name."""

    name: bytes
    sql: bytes


Parameters = Sequence[bytes | None]
Request = tuple[Statement, Parameters]


class PostgresSchema:
    """The names of our tables and functions in one database."""

    def __init__(self, schema: str = "holdfast", prefix: str = "") -> None:
        self.schema = check_identifier(schema, "schema")
        self.prefix = check_identifier(prefix, "prefix") if prefix else ""

    def filled(self, sql: str) -> str:
        """Returns the text with every ``@name`` replaced by its full name in this schema."""
        for word, text in _WORDS.items():
            sql = sql.replace(f"%{word}%", text)
        sql = sql.replace("%prefix%", self.prefix).replace("%schema%", self.schema)
        return re.sub(r"@([a-z_]+)", rf'"{self.schema}"."{self.prefix}\1"', sql)

    def statement(self, name: str, sql: str) -> Statement:
        """Returns a statement with the name that it has where it is prepared."""
        return Statement(f"holdfast_{name}".encode(), self.filled(sql).encode())

    def sql(self) -> str:
        """Returns the whole script. It can be run again."""
        create = (
            f"DO $$ BEGIN IF to_regnamespace('\"{self.schema}\"') IS NULL THEN "
            f'CREATE SCHEMA "{self.schema}"; END IF; END $$;\n'
        )
        made = LEASE_TABLES + _COMMON + LEASE_ADMISSION + LEASE_KEEPING + LEASE_LOOK + ADVISORY
        safe = _FUNCTION.sub(rf"\1 SET search_path = {SAFE_PATH} AS ", self.filled(made))
        return _BEGIN + create + safe + _END


class SharedStatements:
    """The statements of both modes. Each calls one function of the schema and names nothing else:
    it may run in a pooler's session, with a search_path that other roles can write to."""

    def __init__(
        self, schema: PostgresSchema, look: str, survey: str, revoke: str, purge: str
    ) -> None:
        make = schema.statement
        self.look = make("look", f"SELECT * FROM @{look}($1, $2)")  # noqa: S608
        self.survey = make("survey", f"SELECT * FROM @{survey}($1, $2, $3, $4)")  # noqa: S608
        self.revoke = make("revoke", f"SELECT @{revoke}($1, $2)")
        self.purge = make("purge", f"SELECT @{purge}($1, NULL, $2)")
        self.recall = make("recall", "SELECT * FROM @recall($1, $2)")


def schema_sql(*, schema: str = "holdfast", prefix: str = "") -> str:
    """Returns the SQL that makes Holdfast's tables and functions. Running it again changes nothing.

    >>> 'CREATE SCHEMA "locks"' in schema_sql(schema="locks")
    True
    """
    return PostgresSchema(schema, prefix).sql()

"""What Holdfast keeps in PostgreSQL: its tables and functions, and the step that makes them.

``postgres_enter`` runs it where the first connection finds nothing; ``schema_sql`` gives the
same text to whoever may create things where we may not. No client is needed for that.
"""

from __future__ import annotations

import re

from holdfast.backends.postgres_advisory_sql import ADVISORY
from holdfast.backends.postgres_keep_sql import LEASE_KEEPING
from holdfast.backends.postgres_lease_sql import LEASE_ADMISSION, LEASE_TABLES
from holdfast.core.contract import GRACE_SECONDS, IDLE_COUNTER_SECONDS, QUEUE_CAP, STALE_SECONDS
from holdfast.sql import check_identifier
from holdfast.wires.postgres_statement import Statement

__all__ = ["PROTOCOL", "REVISION", "Schema", "schema_sql"]

PROTOCOL = 1
"""Grows when versions can't exclude each other any more. Kept for every namespace."""
REVISION = 6
"""Grows with every change of the functions that older versions can live with."""
_WORDS = {
    "cap": str(QUEUE_CAP),
    "fresh": "(q.reserved IS NULL OR q.reserved >= moment)"
    f" AND q.refreshed >= moment - interval '{STALE_SECONDS} s'",
    "grace": str(GRACE_SECONDS),
    "idle": str(IDLE_COUNTER_SECONDS),
    "revision": str(REVISION),
    "stale": str(STALE_SECONDS),
}

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

-- What every connection asks first. A namespace belongs to one mode: locks of different modes
-- would not exclude each other.
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
"""


class Schema:
    """The names of our tables and functions in one database."""

    def __init__(self, schema: str = "holdfast", prefix: str = "") -> None:
        self.schema = check_identifier(schema, "schema")
        self.prefix = check_identifier(prefix, "prefix") if prefix else ""

    def filled(self, sql: str) -> str:
        """The text with every ``@name`` as the full name it has here."""
        for word, text in _WORDS.items():
            sql = sql.replace(f"%{word}%", text)
        sql = sql.replace("%prefix%", self.prefix)
        return re.sub(r"@([a-z_]+)", rf'"{self.schema}"."{self.prefix}\1"', sql)

    def statement(self, name: str, sql: str) -> Statement:
        """A request of ours, with its name where it is prepared."""
        return Statement(f"holdfast_{name}".encode(), self.filled(sql).encode())

    def sql(self) -> str:
        """All of it, as a script that can be run again."""
        create = (
            f"DO $$ BEGIN IF to_regnamespace('\"{self.schema}\"') IS NULL THEN "
            f'CREATE SCHEMA "{self.schema}"; END IF; END $$;\n'
        )
        return create + self.filled(
            LEASE_TABLES + _COMMON + LEASE_ADMISSION + LEASE_KEEPING + ADVISORY
        )


def schema_sql(*, schema: str = "holdfast", prefix: str = "") -> str:
    """The SQL that makes Holdfast's tables and functions; running it again changes nothing.

    >>> schema_sql(schema="locks").startswith("DO $$ BEGIN IF to_regnamespace")
    True
    """
    return Schema(schema, prefix).sql()

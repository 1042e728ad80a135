"""The tables, and their names in one database.

``enter`` creates what is missing where the first connection finds nothing; ``schema_sql`` gives
the same text to whoever may create things where we may not. No client is needed for that.
"""

from __future__ import annotations

import re

from holdfast.sql import check_identifier

__all__ = ["PROTOCOL", "TABLES", "Schema", "schema_sql"]

PROTOCOL = 1
"""Grows when versions can't exclude each other any more. Kept for every namespace."""
TABLES = ("protocol", "lock", "record", "counter", "transaction")

# Names are bytes: no collation takes case, accents or a trailing blank for the same.
_SQL = """\
CREATE TABLE IF NOT EXISTS @protocol (
  namespace VARBINARY(512) NOT NULL PRIMARY KEY,
  version INT NOT NULL,
  mode VARBINARY(16) NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;

-- Lease rows: all state of a name. Times are in microseconds since 1970.
CREATE TABLE IF NOT EXISTS @lock (
  namespace VARBINARY(512) NOT NULL,
  name VARBINARY(512) NOT NULL,
  version BIGINT NOT NULL,
  token BIGINT NOT NULL,
  owner VARBINARY(64) NOT NULL,
  label BLOB NOT NULL,
  since BIGINT NOT NULL,
  crowd LONGBLOB NOT NULL,
  ends BIGINT NOT NULL,
  PRIMARY KEY (namespace, name)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;

CREATE TABLE IF NOT EXISTS @record (
  namespace VARBINARY(512) NOT NULL,
  name VARBINARY(512) NOT NULL,
  value LONGBLOB NOT NULL,
  token BIGINT NOT NULL,
  written BIGINT NOT NULL,
  expires BIGINT NOT NULL,
  PRIMARY KEY (namespace, name),
  KEY (namespace, expires)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;

-- Advisory mode: tokens, and who took what last. Slot -1 is the name as a whole.
CREATE TABLE IF NOT EXISTS @counter (
  namespace VARBINARY(512) NOT NULL,
  name VARBINARY(512) NOT NULL,
  slot INT NOT NULL,
  token BIGINT NOT NULL,
  capacity INT NOT NULL,
  session BIGINT NOT NULL,
  label BLOB NOT NULL,
  since BIGINT NOT NULL,
  ttl BIGINT NOT NULL,
  PRIMARY KEY (namespace, name, slot),
  KEY (namespace, since)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;

-- Locks in callers' own transactions.
CREATE TABLE IF NOT EXISTS @transaction (
  namespace VARBINARY(512) NOT NULL,
  name VARBINARY(512) NOT NULL,
  token BIGINT NOT NULL,
  PRIMARY KEY (namespace, name),
  KEY (namespace, token)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;
"""


class Schema:
    """The names of our tables in one database."""

    def __init__(self, prefix: str = "holdfast_") -> None:
        self.prefix = check_identifier(prefix, "prefix")

    def filled(self, sql: str) -> str:
        """The text with every ``@name`` as the name that the table has here."""
        return re.sub(r"@([a-z]+)", rf"`{self.prefix}\1`", sql)

    def sql(self) -> str:
        """All of it, as a script that can be run again."""
        return self.filled(_SQL)


def schema_sql(*, prefix: str = "holdfast_") -> str:
    """The SQL that makes Holdfast's tables; running it again changes nothing.

    >>> schema_sql(prefix="hf_").startswith("CREATE TABLE IF NOT EXISTS `hf_protocol`")
    True
    """
    return Schema(prefix).sql()

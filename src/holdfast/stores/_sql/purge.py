"""When a client of MySQL or PostgreSQL deletes the rows of idle names.

Every ``PURGE_EVERY`` attempts a client checks the next ``PURGED_NAMES`` names of its namespace. The
position in the table is stored there, as a record (``POSITION``), because most programs end before
they have checked a large table. The first purge of a client is after a random number of attempts:
a thousand programs with one attempt each purge as often as one program with a thousand.
"""

from __future__ import annotations

from secrets import randbelow

__all__ = ["POSITION", "PURGED_NAMES", "PURGE_EVERY", "attempts_until_purge"]

PURGE_EVERY = 1000
PURGED_NAMES = 2 * PURGE_EVERY
"""More than can be added between two purges, so that a purge gets to the end of the table."""
POSITION = "\x01purged:"
"""Start of the name of the record with a position. The name of a lock has no control characters."""


def attempts_until_purge() -> int:
    """Returns the number of attempts before the first purge of a client, at random."""
    return 1 + randbelow(PURGE_EVERY)

"""What the embedded store does for itself now and then: its log and its idle names.

Copying the log into the file ("checkpoint") is done under the write lock, by a second
connection. Up to SQLite 3.51.2 a copy that runs while somebody starts the log anew may damage
the file; nobody can start it anew while we have the write lock, and nobody else can copy.
"""

from __future__ import annotations

import os
import sqlite3

from holdfast.core.contract import IDLE_COUNTER_SECONDS
from holdfast.stores.sqlite.schema import WAL_DUE_BYTES, note_clock

__all__ = ["EVERY", "checkpoint", "log_is_due", "purge"]

EVERY = 256
"""After so many transactions a backend looks whether anything is to be done."""
ROWS = 4 * EVERY  # several times what was added meanwhile, so the purge keeps up

_IDLE = "since < ?1 AND ends <= ?2 AND crowd = 0 AND token < ?3"
_SCAN = f"SELECT name, {_IDLE} FROM name WHERE name > ?4 ORDER BY name LIMIT {ROWS}"  # noqa: S608
_FORGET = f"DELETE FROM name WHERE name = ?4 AND {_IDLE}"  # noqa: S608
_FORGET_RECORDS = (
    f"DELETE FROM record WHERE name IN (SELECT name FROM record WHERE until < ? LIMIT {ROWS})"  # noqa: S608
)


def log_is_due(path: str) -> bool:
    """Whether the log has grown so much that it should be copied into the file."""
    try:
        return os.stat(f"{path}-wal").st_size > WAL_DUE_BYTES
    except OSError:
        return False


def checkpoint(cursor: sqlite3.Cursor, path: str) -> bool:
    """Copies the log into the file; the next writer starts it anew. Whether all was copied."""
    cursor.execute("BEGIN IMMEDIATE")
    try:
        copier = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            copier.execute("PRAGMA wal_autocheckpoint=0")
            row = copier.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        finally:
            copier.close()
    finally:
        cursor.execute("ROLLBACK")
    busy, logged, copied = row
    return not busy and logged == copied


def purge(cursor: sqlite3.Cursor, now: float, wall: float) -> int:
    """Forgets some names that nobody has used for a week, and records that are over.

    A name goes only once the clock has passed its last token, so that tokens keep growing.
    """
    idle = (wall - IDLE_COUNTER_SECONDS, now, int(wall * 1_000_000))
    (hand,) = cursor.execute("SELECT hand FROM meta").fetchone() or ("",)
    rows = cursor.execute(_SCAN, (*idle, hand)).fetchall()
    gone = [name for name, is_idle in rows if is_idle]
    cursor.execute("BEGIN IMMEDIATE")
    for name in gone:
        cursor.execute(_FORGET, (*idle, name))
    cursor.execute(_FORGET_RECORDS, (wall,))
    cursor.execute("UPDATE meta SET hand = ?", (rows[-1][0] if len(rows) == ROWS else "",))
    note_clock(cursor)
    cursor.execute("COMMIT")
    return len(gone)

"""What the embedded store can tell: holders, waiters, records. Reads that hold up nobody."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from holdfast.backends.sqlite_file import Place
from holdfast.backends.sqlite_host import file_system
from holdfast.backends.sqlite_line import MODES, read_slots
from holdfast.claim import Holder, Mode, Record, Standing, Waiter, read_label
from holdfast.core.contract import Finding, Page
from holdfast.wires.datagram import supported

__all__ = ["probe", "recall", "standing", "survey"]

# Idle names are in the way of a survey: it looks at so many rows, then hands out a cursor.
MOST_ROWS = 2000
CHECKED_BYTES = 64 << 20

_HELD = "SELECT label, token, since, ends, owner FROM name WHERE name = ?"
_CROWD = (
    "SELECT mode, capacity, token, slots, label, since, ends, reserved, behind "
    "FROM claim WHERE name = ? ORDER BY place"
)
_NAMES = (
    "SELECT name, ends > ? OR crowd > 0 FROM name WHERE name > ? AND name >= ? "
    "ORDER BY name LIMIT ?"
)


def standing(cursor: sqlite3.Cursor, key: str, name: str, now: float) -> Standing:
    """One name, in one snapshot."""
    cursor.execute("BEGIN")
    found = _standing(cursor, key, name, now)
    cursor.execute("COMMIT")
    return found


def _standing(cursor: sqlite3.Cursor, key: str, name: str, now: float) -> Standing:
    holders: list[Holder] = []
    waiters: list[Waiter] = []
    limit = 0
    held = cursor.execute(_HELD, (key,)).fetchone()
    if held is not None and held[4] and held[3] > now:
        label, token, since, ends, _ = held
        holders.append(Holder(*read_label(label), Mode.EXCLUSIVE, token, (), since, ends - now))
    for row in cursor.execute(_CROWD, (key,)).fetchall():
        mode, capacity, token, slots, label, since, ends, reserved, behind = row
        if ends <= now or 0 < reserved < now:
            continue
        limit = limit or capacity
        who = read_label(label)
        if token:
            numbers = read_slots(slots)
            holders.append(Holder(*who, MODES[mode], token, numbers, since, ends - now))
        else:
            waiters.append(Waiter(*who, MODES[mode], since, behind))
    return Standing(name, limit, tuple(holders), tuple(waiters))


def survey(
    cursor: sqlite3.Cursor, space: str, prefix: str, after: str, limit: int, now: float
) -> Page:
    """Names in use that start with the prefix, behind the cursor."""
    start = space + prefix
    cursor.execute("BEGIN")
    rows = cursor.execute(_NAMES, (now, space + after, start, MOST_ROWS)).fetchall()
    standings: list[Standing] = []
    seen = after
    for key, used in rows:
        if not key.startswith(start) or len(standings) >= limit:
            break
        seen = key[len(space) :]
        if used:
            found = _standing(cursor, key, seen, now)
            if found.holders or found.waiters:
                standings.append(found)
    cursor.execute("COMMIT")
    more = bool(rows) and rows[-1][0] != space + seen and len(standings) >= limit
    return Page(standings, seen if more or len(rows) == MOST_ROWS else None)


def recall(cursor: sqlite3.Cursor, key: str, wall: float) -> Record | None:
    """The record of a name, unless its time is over."""
    statement = "SELECT value, token, written FROM record WHERE name = ? AND until > ?"
    row = cursor.execute(statement, (key, wall)).fetchone()
    if row is None:
        return None
    value, token, written = row
    return Record(value, token, max(0.0, wall - written))


def probe(cursor: sqlite3.Cursor, place: Place) -> list[Finding]:
    """What the store's promises rest on here."""
    kind = file_system(place.folder)
    shared = f"shared with the group {place.group}" if place.group else "private to this user"
    findings = [
        Finding("file", f"{place.path}, {shared}"),
        Finding("file system", kind or "unknown: make sure that it is a local disk"),
        Finding("SQLite", _about_version()),
    ]
    if kind == "overlay":
        seen = "overlay: a container's own layer, whose locks no other container sees"
        findings[1] = Finding("file system", seen, "warning")
    if not supported():
        findings.append(Finding("wake-ups", "no datagram sockets here: waiters poll", "warning"))
    if Path(place.path).stat().st_size <= CHECKED_BYTES:
        verdict = cursor.execute("PRAGMA quick_check(1)").fetchall()[0][0]
        level = "ok" if verdict == "ok" else "broken"
        findings.append(Finding("contents", f"quick check: {verdict}", level))
    return findings


def _about_version() -> str:
    if sqlite3.sqlite_version_info >= (3, 51, 3):
        return sqlite3.sqlite_version
    return f"{sqlite3.sqlite_version}, with its fault in restarting the log kept at bay"

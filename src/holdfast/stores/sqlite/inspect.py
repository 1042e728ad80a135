"""What the embedded store can tell: holders, waiters, records. Reads that hold up nobody."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from holdfast.claim import Holder, LockInfo, Mode, Record, Waiter, check_name, read_label
from holdfast.core.contract import Finding, Page
from holdfast.errors import InvalidName
from holdfast.stores.sqlite import row as read
from holdfast.stores.sqlite.datagram import supported
from holdfast.stores.sqlite.file import Place
from holdfast.stores.sqlite.host import file_system

__all__ = ["probe", "recall", "standing", "survey"]

# Idle names are in the way of a survey: it looks at so many rows, then hands out a cursor.
MOST_ROWS = 2000
CHECKED_BYTES = 64 << 20

_HELD = "SELECT label, token, since, ends, owner FROM name WHERE name = ?"
_CROWD = (
    "SELECT mode, capacity, token, slots, label, since, ends, reserved, behind "
    "FROM claim WHERE name = ? ORDER BY place"
)
# As bytes: a name that is not in UTF-8 must not end the survey, nor keep it from going on.
_NAMES = (
    "SELECT CAST(name AS BLOB), ends > ?1 OR crowd > 0 FROM name "
    "WHERE name > CAST(?2 AS TEXT) AND name >= CAST(?3 AS TEXT) AND typeof(name) = 'text' "
    "ORDER BY name LIMIT ?4"
)
_RECORD = "SELECT CAST(value AS BLOB), token, written FROM record WHERE name = ? AND until > ?"
LONGEST_SHOWN = 80
"""How much of a name is shown that is none of ours."""


def standing(cursor: sqlite3.Cursor, key: str, name: str, now: float) -> LockInfo:
    """One name, in one snapshot; raises ``Unreadable``."""
    cursor.execute("BEGIN")
    found = _standing(cursor, key, name, now)
    cursor.execute("COMMIT")
    return found


def _standing(cursor: sqlite3.Cursor, key: str, name: str, now: float) -> LockInfo:
    holders: list[Holder] = []
    waiters: list[Waiter] = []
    limit = 0
    held = cursor.execute(_HELD, (key,)).fetchone()
    if held is not None and held[4]:
        label, token, since, ends, _ = held
        if read.moment(ends, "end") > now:
            holders.append(_holder(label, Mode.EXCLUSIVE, token, "", since, ends - now))
    for row in cursor.execute(_CROWD, (key,)).fetchall():
        mode, capacity, token, slots, label, since, ends, reserved, behind = row
        if read.moment(ends, "end") <= now or 0 < read.moment(reserved, "reservation") < now:
            continue
        limit = limit or read.count(capacity, "limit")
        if read.token(token):
            holders.append(_holder(label, read.mode(mode), token, slots, since, ends - now))
        else:
            since, behind = read.moment(since, "begin"), read.count(behind, "number behind it")
            waiters.append(Waiter(*_label(label), read.mode(mode), since, behind))
    return LockInfo(name, limit, tuple(holders), tuple(waiters))


def _label(label: object) -> tuple[str, int, str, str]:
    return read_label(label if isinstance(label, str) else "")


def _holder(
    label: object, mode: Mode, token: object, slots: object, since: object, remaining: float
) -> Holder:
    numbers, began = read.slots(slots), read.moment(since, "begin")
    return Holder(*_label(label), mode, read.token(token), numbers, began, remaining)


def survey(
    cursor: sqlite3.Cursor, space: str, prefix: str, after: str, limit: int, now: float
) -> Page:
    """Names in use that start with the prefix, behind the cursor."""
    all_names = space.encode()
    start = all_names + prefix.encode()
    behind = all_names + after.encode(errors="surrogateescape")
    cursor.execute("BEGIN")
    rows = cursor.execute(_NAMES, (now, behind, start, MOST_ROWS)).fetchall()
    standings: list[LockInfo] = []
    seen = behind
    for key, used in rows:
        if not key.startswith(start) or len(standings) >= limit:
            break
        seen = key
        if used:
            found = _surveyed(cursor, key, len(all_names), now)
            if found.holders or found.waiters or found.notice:
                standings.append(found)
    cursor.execute("COMMIT")
    more = bool(rows) and rows[-1][0] != seen and len(standings) >= limit
    here = seen[len(all_names) :].decode(errors="surrogateescape")
    return Page(standings, here if more or len(rows) == MOST_ROWS else None)


def _surveyed(cursor: sqlite3.Cursor, key: bytes, space: int, now: float) -> LockInfo:
    """One name of a survey. What can't be read is told of, and the survey goes on."""
    name = key[space:].decode(errors="backslashreplace")
    try:
        check_name(read.whole_text(key[space:], "name"))
        return _standing(cursor, key.decode(), name, now)
    except (read.Unreadable, InvalidName) as error:
        shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…"
        notice = f"what is stored under this name can't be read: {error}"
        return LockInfo(shown, 0, (), (), notice)


def recall(cursor: sqlite3.Cursor, key: str, wall: float) -> Record | None:
    """The record of a name, unless its time is over; raises ``Unreadable``."""
    row = cursor.execute(_RECORD, (key, wall)).fetchone()
    if row is None:
        return None
    value, token, written = row
    age = wall - read.moment(written, "record's time")
    return Record(read.whole_text(value, "record"), read.token(token), max(0.0, age))


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

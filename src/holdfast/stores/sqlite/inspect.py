"""What the embedded store shows: holders, waiters, records. Its reads block no writer."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from holdfast.claim import (
    Holder,
    LockInfo,
    Mode,
    Record,
    Waiter,
    check_name,
    read_holds,
    read_label,
)
from holdfast.core.contract import Finding, Page
from holdfast.errors import InvalidName
from holdfast.stores.sqlite import row as read
from holdfast.stores.sqlite.file import StoreFile
from holdfast.stores.sqlite.host import file_system
from holdfast.stores.sqlite.wakeups import supported

__all__ = ["look", "probe", "recall", "survey"]

MOST_ROWS = 2000
"""How many rows a page of a survey reads, idle names included, before it returns a cursor."""
CHECKED_BYTES = 64 << 20

_HELD = "SELECT label, token, since, ends, owner FROM name WHERE name = ?"
_CLAIMS = (
    "SELECT mode, capacity, token, slots, label, since, ends, reserved, behind "
    "FROM claim WHERE name = ? ORDER BY place"
)
# As bytes: a name that is not in UTF-8 must not stop the survey.
_NAMES = (
    "SELECT CAST(name AS BLOB), ends > ? OR crowd > 0 FROM name "
    "WHERE name > CAST(? AS TEXT) AND name >= CAST(? AS TEXT) AND typeof(name) = 'text' "
    "ORDER BY name LIMIT ?"
)
_RECORD = "SELECT CAST(value AS BLOB), token, written FROM record WHERE name = ? AND until > ?"
LONGEST_SHOWN = 80
"""How many characters are shown of a name that Holdfast has not written."""


def look(cursor: sqlite3.Cursor, key: str, name: str, now: float) -> LockInfo:
    """Holders and waiters of one name, in one snapshot. Raises ``Unreadable``."""
    cursor.execute("BEGIN")
    found = _lock_info(cursor, key, name, now)
    cursor.execute("COMMIT")
    return found


def _lock_info(cursor: sqlite3.Cursor, key: str, name: str, now: float) -> LockInfo:
    holders: list[Holder] = []
    waiters: list[Waiter] = []
    limit = 0
    held = cursor.execute(_HELD, (key,)).fetchone()
    if held is not None and held[4]:
        label, token, since, ends, _ = held
        if read.moment(ends, "end") > now:
            holders.append(_holder(label, Mode.EXCLUSIVE, token, "", since, ends - now))
    for row in cursor.execute(_CLAIMS, (key,)).fetchall():
        mode, capacity, token, slots, label, since, ends, reserved, behind = row
        if read.moment(ends, "end") <= now or 0 < read.moment(reserved, "reservation") < now:
            continue
        limit = limit or read.count(capacity, "limit")
        if read.token(token):
            holders.append(_holder(label, read.mode(mode), token, slots, since, ends - now))
        else:
            since, behind = read.moment(since, "begin"), read.count(behind, "number behind it")
            who, holds = read_label(_text(label)), read_holds(_text(label))
            waiters.append(Waiter(*who, read.mode(mode), since, behind, holds))
    return LockInfo(name, limit, tuple(holders), tuple(waiters))


def _text(label: object) -> str:
    return label if isinstance(label, str) else ""


def _holder(
    label: object, mode: Mode, token: object, slots: object, since: object, remaining: float
) -> Holder:
    numbers, began = read.slots(slots), read.moment(since, "begin")
    return Holder(*read_label(_text(label)), mode, read.token(token), numbers, began, remaining)


def survey(
    cursor: sqlite3.Cursor, space: str, prefix: str, after: str, limit: int, now: float
) -> Page:
    """Names in use that start with the prefix, after the cursor."""
    all_names = space.encode()
    start = all_names + prefix.encode()
    behind = all_names + after.encode(errors="surrogateescape")
    cursor.execute("BEGIN")
    rows = cursor.execute(_NAMES, (now, behind, start, MOST_ROWS)).fetchall()
    infos: list[LockInfo] = []
    seen = behind
    for key, used in rows:
        if not key.startswith(start) or len(infos) >= limit:
            break
        seen = key
        if used:
            found = _surveyed(cursor, key, len(all_names), now)
            if found.holders or found.waiters or found.notice:
                infos.append(found)
    cursor.execute("COMMIT")
    more = bool(rows) and rows[-1][0] != seen and len(infos) >= limit
    here = seen[len(all_names) :].decode(errors="surrogateescape")
    return Page(infos, here if more or len(rows) == MOST_ROWS else None)


def _surveyed(cursor: sqlite3.Cursor, key: bytes, space: int, now: float) -> LockInfo:
    """One name of a survey. A name that can't be read gets a notice, and the survey goes on."""
    name = key[space:].decode(errors="backslashreplace")
    try:
        check_name(read.whole_text(key[space:], "name"))
        return _lock_info(cursor, key.decode(), name, now)
    except (read.Unreadable, InvalidName) as error:
        shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…"
        notice = f"what is stored under this name can't be read: {error}"
        return LockInfo(shown, 0, (), (), notice)


def recall(cursor: sqlite3.Cursor, key: str, wall: float) -> Record | None:
    """The record of a name; ``None`` if it has expired. Raises ``Unreadable``."""
    row = cursor.execute(_RECORD, (key, wall)).fetchone()
    if row is None:
        return None
    value, token, written = row
    age = wall - read.moment(written, "record's time")
    return Record(read.whole_text(value, "record"), read.token(token), max(0.0, age))


def probe(cursor: sqlite3.Cursor, file: StoreFile) -> list[Finding]:
    """Checks what the guarantees depend on here."""
    kind = file_system(file.folder)
    shared = f"shared with the group {file.group}" if file.group else "private to this user"
    findings = [
        Finding("file", f"{file.path}, {shared}"),
        Finding("file system", kind or "unknown: make sure that it is a local disk"),
        Finding("SQLite", _about_version()),
    ]
    if kind == "overlay":
        detail = "overlay: a container's own layer, whose locks no other container sees"
        findings[1] = Finding("file system", detail, "warning")
    if not supported():
        findings.append(Finding("wake-ups", "no datagram sockets here: waiters poll", "warning"))
    if Path(file.path).stat().st_size <= CHECKED_BYTES:
        verdict = cursor.execute("PRAGMA quick_check(1)").fetchall()[0][0]
        level = "ok" if verdict == "ok" else "broken"
        findings.append(Finding("contents", f"quick check: {verdict}", level))
    return findings


def _about_version() -> str:
    if sqlite3.sqlite_version_info >= (3, 51, 3):
        return sqlite3.sqlite_version
    return f"{sqlite3.sqlite_version}, whose fault in restarting the log is avoided"

"""What is stored in the embedded store's file, and how it is opened.

``name`` has one row per name: its last token and, inline, its exclusive hold, so that an
uncontended acquire is one statement on one row. ``claim`` has everybody else: those who wait,
and who shares a name or has slots of it; ``name.crowd`` counts them, and 0 opens the fast path.
``meta`` has one row: whose boot the leases belong to, and the marks that keep tokens growing.

Tokens. Commits are not synced one by one, so a power cut may take the last ones back. Every
token that is handed out is therefore below ``meta.high``, which is only ever raised by a synced
commit, far ahead; a new boot starts from there (``meta.floor``), whatever its clock says.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import GuaranteeNotMet, Incompatible, Unsupported
from holdfast.io import clock
from holdfast.stores.sqlite import row as read
from holdfast.stores.sqlite.connection import FileId
from holdfast.stores.sqlite.file import Place
from holdfast.stores.sqlite.host import Machine, this_machine

__all__ = ["Marks", "note_clock", "open_file", "raise_high", "synced"]

APPLICATION_ID = 0x484F4C44  # "HOLD", for file(1)
PROTOCOL = 1
OLDEST_SQLITE = (3, 35, 0)  # RETURNING
HIGH_STEP = 3_600_000_000  # an hour in µs: one synced commit per hour of use, and one per boot
PAGE_BYTES = 2048  # every commit writes one page at least; a usual row is a tenth of it
WAL_LIMIT_BYTES = 4 << 20
WAL_DUE_BYTES = 5 << 20
"""The log is copied into the file when it is larger; the next writer cuts it to the limit."""

# The very text of these is part of the protocol: a file that says anything else is refused.
TABLES = (
    """CREATE TABLE meta (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        boot TEXT NOT NULL,    -- the boot whose clock the leases are measured by
        host TEXT NOT NULL,
        clock REAL NOT NULL,   -- that clock when the file was last opened
        floor INTEGER NOT NULL,-- tokens of this boot are not below it
        high INTEGER NOT NULL, -- tokens are below it: raised by synced commits only
        hand TEXT NOT NULL     -- how far the purge of idle names has come
    )""",
    """CREATE TABLE name (
        name TEXT PRIMARY KEY, -- namespace, separator, name
        token INTEGER NOT NULL,-- the last one given
        owner TEXT NOT NULL,   -- of the exclusive hold; empty if there is none
        label TEXT NOT NULL,
        since REAL NOT NULL,   -- wall clock of the last grant
        ends REAL NOT NULL,    -- boot clock; 0 if there is no exclusive hold
        crowd INTEGER NOT NULL -- how many rows in claim
    ) WITHOUT ROWID""",
    """CREATE TABLE claim (
        name TEXT NOT NULL,
        place INTEGER NOT NULL,-- order of arrival
        owner TEXT NOT NULL,
        mode TEXT NOT NULL,
        weight INTEGER NOT NULL,
        capacity INTEGER NOT NULL, -- the claim's limit
        token INTEGER NOT NULL,-- 0 while it waits
        slots TEXT NOT NULL,
        label TEXT NOT NULL,
        since REAL NOT NULL,   -- wall clock
        ends REAL NOT NULL,    -- boot clock: of the hold, or when a waiter counts as gone
        reserved REAL NOT NULL,-- boot clock: until when the name waits for it; 0 before that
        address TEXT NOT NULL, -- where to wake it
        behind INTEGER NOT NULL,
        PRIMARY KEY (name, place)
    ) WITHOUT ROWID""",
    """CREATE TABLE record (
        name TEXT PRIMARY KEY,
        value TEXT NOT NULL,
        token INTEGER NOT NULL,
        written REAL NOT NULL, -- wall clock: records outlive a boot
        until REAL NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX record_until ON record (until)",
)


Marks = tuple[int, int]
"""What a connection must know to hand out tokens: ``meta.floor`` and ``meta.high``."""


def open_file(place: Place, adopt: bool = False) -> tuple[sqlite3.Connection, FileId, Marks]:
    """Opens the store's file, made if need be. Raises before it changes anything. Also answers
    which file was there before: it is the one that is open if it is still there afterwards."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise Unsupported(
            f"sqlite:// needs SQLite {'.'.join(map(str, OLDEST_SQLITE))} or newer; "
            f"this Python has {sqlite3.sqlite_version}"
        )
    file = place.ready()
    connection = sqlite3.connect(
        place.path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    connection.text_factory = _read_text
    try:
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 0)  # none runs, not even once
        machine = this_machine()
        if _is_new(connection, place.path):
            _create(connection, machine)
        _check_schema(connection, place.path)
        _configure(connection)
        return connection, file, _join_boot(connection, place.path, machine, adopt)
    except BaseException:
        connection.close()
        raise


def _read_text(data: bytes) -> str:
    """Never raises: text that is not in UTF-8 is somebody else's, and equals none of ours."""
    return data.decode(errors="replace")


def _one(connection: sqlite3.Connection, statement: str) -> int:
    row: tuple[int] = connection.execute(statement).fetchone()
    return row[0]


def _is_new(connection: sqlite3.Connection, path: str) -> bool:
    """Whether the file is empty; raises ``Incompatible`` if it is not for us."""
    # In this order: another process may make all of it, in one commit, between any two of these.
    tables = _one(connection, "SELECT count(*) FROM sqlite_master")
    application = _one(connection, "PRAGMA application_id")
    version = _one(connection, "PRAGMA user_version")
    if application == 0 and tables == 0:
        return True
    if application != APPLICATION_ID:
        raise Incompatible(f"{path} is a SQLite file of something else: name another file")
    if version != PROTOCOL:
        raise Incompatible(
            f"{path} is used with protocol {version}, this version has {PROTOCOL}: "
            "the two can't exclude each other, so it was not touched"
        )
    return False


def _check_schema(connection: sqlite3.Connection, path: str) -> None:
    """Raises ``Incompatible`` unless the file has what we make and nothing else: a trigger or view
    that somebody added would run inside our own requests. (``ANALYZE`` adds a table of numbers.)"""
    found = connection.execute(
        "SELECT sql FROM sqlite_master WHERE name NOT IN ('sqlite_stat1', 'sqlite_stat4')"
    ).fetchall()
    if sorted(map(str, (sql for (sql,) in found))) != sorted(TABLES):
        raise Incompatible(
            f"{path} has tables, triggers or views that this version does not make: somebody has "
            "changed it, so it was not touched. Move it away while nobody uses it; tokens go on "
            "from the clock"
        )


def _create(connection: sqlite3.Connection, machine: Machine) -> None:
    """Before there is a log: all pages are in the file then, and a full disk can't keep the log
    from being copied back over them. The commit is synced, so the marks can be used at once."""
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("BEGIN EXCLUSIVE")
    if _one(connection, "SELECT count(*) FROM sqlite_master") == 0:  # nobody was faster
        for table in TABLES:
            connection.execute(table)
        marks = (machine.boot, machine.host, clock.now(), _above(0))
        connection.execute("INSERT INTO meta VALUES (1, ?, ?, ?, 0, ?, '')", marks)
        connection.execute(f"PRAGMA user_version={PROTOCOL}")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute("COMMIT")


def _configure(connection: sqlite3.Connection) -> None:
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise GuaranteeNotMet(f"SQLite can't keep a write-ahead log here (it offers {mode})")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA fullfsync=ON")
    # SQLite up to 3.51.2 may damage a file whose log is copied by one connection while another
    # starts it anew. Only sqlite_chores copies it, under the write lock.
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute(f"PRAGMA journal_size_limit={WAL_LIMIT_BYTES}")


_META = "SELECT boot, host, clock, floor, high FROM meta"


def _join_boot(connection: sqlite3.Connection, path: str, machine: Machine, adopt: bool) -> Marks:
    boot, host, seen, floor, high = _read_marks(connection, path)
    _refuse_hidden_boot(boot, path, machine, adopt)
    if not _rebooted(boot, seen, machine):
        if not machine.boot:
            note_clock(connection)
        return floor, high
    connection.execute("BEGIN IMMEDIATE")
    boot, host, seen, floor, high = _read_marks(connection, path)
    _refuse_hidden_boot(boot, path, machine, adopt)
    if _rebooted(boot, seen, machine):
        if boot and host and machine.host and host != machine.host and not adopt:
            raise GuaranteeNotMet(
                f"{path} was last used by another machine, and what it holds can't be told from "
                "here: use a file of this machine's own, or, if that one no longer runs, open "
                "this file once with ?adopt=on"
            )
        floor = max(floor, high)
        connection.execute("DELETE FROM claim")
        connection.execute(
            "UPDATE name SET owner = '', ends = 0, crowd = 0 WHERE ends <> 0 OR crowd <> 0"
        )
        connection.execute(
            "UPDATE meta SET boot = ?, host = ?, clock = ?, floor = ?",
            (machine.boot, machine.host, clock.now(), floor),
        )
    connection.execute("COMMIT")
    return floor, high


def _read_marks(connection: sqlite3.Connection, path: str) -> tuple[str, str, float, int, int]:
    rows = connection.execute(_META).fetchall()
    try:
        ((boot, host, seen, floor, high),) = rows
        texts = read.text(boot, "boot"), read.text(host, "host")
        return *texts, read.moment(seen, "clock"), read.last_token(floor), read.last_token(high)
    except ValueError:
        raise Incompatible(
            f"{path} is damaged: the marks that keep tokens growing can't be read. Move it away "
            "while nobody uses it; tokens go on from the clock"
        ) from None


def _refuse_hidden_boot(boot: str, path: str, machine: Machine, adopt: bool) -> None:
    """No id against an id tells nothing: it may be this boot's, whose holds must stay."""
    if boot and not machine.boot:
        raise GuaranteeNotMet(
            f"{path} is used by processes that can read the kernel's boot id, and this one can't, "
            "so it can't tell whether what they hold is of this boot: let it read "
            "/proc/sys/kernel/random/boot_id (systemd: ProcSubset=all; a chroot: mount /proc), or "
            "give it a file of its own"
        )
    if machine.boot and not boot and not adopt:
        raise GuaranteeNotMet(
            f"{path} is used by processes that can't read the kernel's boot id, and this one can, "
            "so it can't tell whether what they hold is of this boot: let them read it, too, and "
            "once none of them has the file open, open it once with ?adopt=on"
        )


def _rebooted(boot: str, seen: float, machine: Machine) -> bool:
    """Whether the leases in the file are of another boot than ours."""
    if boot or machine.boot:
        return boot != machine.boot
    return seen == 0 or clock.now() < seen  # no ids on this system: its clock started over


def note_clock(connection: sqlite3.Connection | sqlite3.Cursor) -> None:
    """Leaves a mark for systems without boot ids: a later boot's clock is behind it."""
    connection.execute("UPDATE meta SET clock = max(clock, ?)", (clock.now(),))


@contextmanager
def synced(cursor: sqlite3.Cursor) -> Iterator[None]:
    """What is committed inside is on the disk before it counts as done."""
    connection = cursor.connection  # the cursor may be closed by then: see wires.sqlite
    connection.execute("PRAGMA synchronous=FULL")
    try:
        yield
    finally:
        connection.rollback()
        connection.execute("PRAGMA synchronous=NORMAL")


def raise_high(cursor: sqlite3.Cursor, token: int, path: str) -> int:
    """Raises the mark that all tokens are below, so that this token may be handed out."""
    with synced(cursor):
        cursor.execute("UPDATE meta SET high = ?1 WHERE high <= ?2", (_above(token), token))
        return _read_marks(cursor.connection, path)[-1]


def _above(token: int) -> int:
    """A mark that this token, and those of the next hour, are below."""
    return max(token, int(clock.wall() * 1_000_000)) + HIGH_STEP

"""What is stored in the embedded store's file, and how the file is opened.

``name`` has one row per name: its last token and, inline, its exclusive hold, so that an
uncontended acquire is one statement on one row. ``claim`` has all other claims: waiters, shared
holds and slots holds. ``name.crowd`` counts them, and 0 allows the fast path. ``meta`` has one row:
the boot that the leases belong to, and the marks that keep tokens growing.

Tokens. Commits are not synced one by one, so a power cut may undo the last ones. So every token is
below ``meta.high``, which only a synced commit raises, by a large step. A new boot starts its
tokens from there (``meta.floor``), whatever its clock says.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import GuaranteeNotMet, Incompatible, Unsupported
from holdfast.io import clock
from holdfast.stores.sqlite import row as read
from holdfast.stores.sqlite.connection import FileId
from holdfast.stores.sqlite.file import StoreFile
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

# The exact text, comments included, is part of the protocol: a file with another text is refused.
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
"""What a connection must know to give tokens: ``meta.floor`` and ``meta.high``."""


def open_file(file: StoreFile, adopt: bool = False) -> tuple[sqlite3.Connection, FileId, Marks]:
    """Opens the store's file, and makes it if it is missing. Raises before anything is changed. The
    returned id is that of the file at the path before it was opened: the open file is that one if
    it is still at the path afterwards."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise Unsupported(
            f"sqlite:// needs SQLite {'.'.join(map(str, OLDEST_SQLITE))} or newer; "
            f"this Python has {sqlite3.sqlite_version}"
        )
    file_id = file.ready()
    connection = sqlite3.connect(
        file.path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    connection.text_factory = _read_text
    try:
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 0)  # no trigger runs
        machine = this_machine()
        if _is_new(connection, file.path):
            _create(connection, machine)
        _check_schema(connection, file.path)
        _configure(connection)
        return connection, file_id, _join_boot(connection, file.path, machine, adopt)
    except BaseException:
        connection.close()
        raise


def _read_text(data: bytes) -> str:
    """Decodes without errors. Text that is not UTF-8 equals no text of Holdfast."""
    return data.decode(errors="replace")


def _one(connection: sqlite3.Connection, statement: str) -> int:
    row: tuple[int] = connection.execute(statement).fetchone()
    return row[0]


def _is_new(connection: sqlite3.Connection, path: str) -> bool:
    """Whether the file is empty. Raises ``Incompatible`` if it belongs to other software."""
    # In this order: another process may make all tables, in one commit, between any two of these.
    tables = _one(connection, "SELECT count(*) FROM sqlite_master")
    application = _one(connection, "PRAGMA application_id")
    version = _one(connection, "PRAGMA user_version")
    if application == 0 and tables == 0:
        return True
    if application != APPLICATION_ID:
        raise Incompatible(f"{path} is a SQLite file of other software: name another file")
    if version != PROTOCOL:
        raise Incompatible(
            f"{path} is used with protocol {version}, this version has {PROTOCOL}: "
            "the two can't exclude each other, so it was not touched"
        )
    return False


def _check_schema(connection: sqlite3.Connection, path: str) -> None:
    """Raises ``Incompatible`` unless the file has exactly the tables of this version: an added
    trigger or view would run inside our own requests. (``ANALYZE`` adds a table of numbers.)"""
    found = connection.execute(
        "SELECT sql FROM sqlite_master WHERE name NOT IN ('sqlite_stat1', 'sqlite_stat4')"
    ).fetchall()
    if sorted(map(str, (sql for (sql,) in found))) != sorted(TABLES):
        raise Incompatible(
            f"{path} has tables, triggers or views that this version does not make: it was changed "
            "by other software, so it was not touched. Move it away while no program uses it; "
            "tokens continue from the clock"
        )


def _create(connection: sqlite3.Connection, machine: Machine) -> None:
    """Makes the tables before there is a log: all pages are in the file then, and a checkpoint can
    write over them even on a full disk. The commit is synced, so the marks can be used at once."""
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("BEGIN EXCLUSIVE")
    if (
        _one(connection, "SELECT count(*) FROM sqlite_master") == 0
    ):  # no other process has made them
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
    # SQLite up to 3.51.2 may damage a file if one connection runs a checkpoint while another
    # restarts the log. Only ``backend.checkpoint`` runs one, under the write lock.
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
                f"{path} was last used by another machine, whose holds may not have ended: use a "
                "file of this machine's own, or, if that machine no longer runs, open this file "
                "once with ?adopt=on"
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
            "while no program uses it; tokens continue from the clock"
        ) from None


def _refuse_hidden_boot(boot: str, path: str, machine: Machine, adopt: bool) -> None:
    """Raises ``GuaranteeNotMet`` if only one of the two boots has an id: they may be the same boot,
    whose holds must stay."""
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
    return (
        seen == 0 or clock.now() < seen
    )  # a system without ids: after a reboot the clock starts over


def note_clock(connection: sqlite3.Connection | sqlite3.Cursor) -> None:
    """Writes the clock, for systems without boot ids: the clock of a later boot is behind it."""
    connection.execute("UPDATE meta SET clock = max(clock, ?)", (clock.now(),))


@contextmanager
def synced(cursor: sqlite3.Cursor) -> Iterator[None]:
    """Commits inside return only after they are on the disk."""
    connection = cursor.connection  # the cursor may be closed by then: see ``connection``
    connection.execute("PRAGMA synchronous=FULL")
    try:
        yield
    finally:
        connection.rollback()
        connection.execute("PRAGMA synchronous=NORMAL")


def raise_high(cursor: sqlite3.Cursor, token: int, path: str) -> int:
    """Raises the mark that all tokens are below above this token. Returns the mark."""
    with synced(cursor):
        cursor.execute("UPDATE meta SET high = ? WHERE high <= ?", (_above(token), token))
        return _read_marks(cursor.connection, path)[-1]


def _above(token: int) -> int:
    """A mark above this token and the tokens of the next hour."""
    return max(token, int(clock.wall() * 1_000_000)) + HIGH_STEP

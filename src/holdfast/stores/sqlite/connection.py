"""One SQLite connection, used by many threads and never blocking for long.

SQLite's own busy handler is off: whoever finds the file locked sleeps for a moment through the
runtime and tries again, so the same code serves threads and event loops. All of a request runs
under one mutex and never suspends in between. SQLite's errors are mapped here.

Somebody may remove or replace the file while it is open. What is written to the old one nobody
else sees, so after every request (but the release of a short hold) it is looked whether the
file at the path is still the one that is open; if not, the request is done again on the new one.
A file is known by its number, and file systems give the number of one that is gone to the next: a
pin keeps the old one's in use until another is open.

Fork. SQLite keeps, per process, what it believes to have locked of a file. A forked child
inherits that belief without the locks: a new connection beside an inherited one would take
none, and lose its writes when the parent closes the file. So the child closes what it
inherited, first of all, which disturbs nobody: the locks are the parent's. The mutexes are held
across the fork, so that nothing inherited is in the middle of a request.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable, HoldfastError, Incompatible, Unsupported
from holdfast.io import clock, lifetime

__all__ = ["FileId", "SqliteWire"]

P = ParamSpec("P")
T = TypeVar("T")

SHORTEST_PAUSE_SECONDS = 0.00003
LONGEST_PAUSE_SECONDS = 0.004
FORK_SECONDS = 1.0
LONGEST_LEFT_BYTES = 256 << 10
"""The longest log that is left behind: dozens of commands, and half a millisecond to read."""
WRITE_LOCK_BYTE = "120"  # of the -shm file: part of SQLite's file format


FileId = tuple[int, int]
"""Which file: its device and its number there."""


class FileReplaced(sqlite3.OperationalError):
    """The request was done in a file that is no longer the one at the path."""

    def __init__(self) -> None:
        super().__init__("it was removed or replaced while it was in use")


class Garbled(sqlite3.DatabaseError):
    """SQLite's own message quotes bytes of the file that are no text, so Python can't tell it."""

    def __init__(self) -> None:
        super().__init__("its tables can't be read")
        self.sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class _Pin:
    """Keeps the number of a file in use (Linux). Unlike others, this handle touches none of the
    file's locks when it is closed, also by a forked child."""

    def __init__(self, path: str) -> None:
        self._handle: int | None = None
        if hasattr(os, "O_PATH"):
            with suppress(OSError):
                self._handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._handle is not None:
            close(self._handle)


class SqliteWire:
    """A connection that is opened at its first request and after a failure."""

    def __init__(
        self,
        path: str,
        opener: Callable[[], tuple[sqlite3.Connection, FileId]],
        relief: Callable[[sqlite3.Cursor], object],
        runtime: Runtime,
        seconds: float,
    ) -> None:
        self.path, self.ran = path, 0
        self._opener, self._relief = opener, relief
        self._runtime, self._seconds = runtime, seconds
        # Re-entrant: a signal handler or a destructor may strike in the middle of a request.
        self._mutex = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._cursor: sqlite3.Cursor | None = None
        self.file: FileId | None = None
        """The file that is open. What ``opener`` saw at the path before it opened it."""
        self._pin: _Pin | None = None
        self._torn = self._opening = False
        self._unusable = ""
        _open_wires.add(self)

    # The fast path: one statement, as few steps around it as can be.

    def change(
        self, statement: str, parameters: tuple[object, ...], *, look: bool = True
    ) -> FileId | None:
        """The file in which one statement changed a row, or ``None`` if it changed none.
        Raises SQLite's errors as they are. Only what grants nothing may do without the look
        whether the file is still the one at the path."""
        try:
            with self._mutex:
                cursor = self._cursor
                if cursor is None or self._torn:
                    cursor = self._ready()
                self._torn = True  # whatever ends it early, also an interrupt right here
                changed = cursor.execute(statement, parameters).rowcount
                self._torn = False
                self.ran += 1
                if look and self.file_at_path() != self.file:
                    raise FileReplaced
                return self.file if changed else None
        except UnicodeDecodeError as error:
            self._mend(Garbled())
            raise Garbled from error
        except BaseException as error:
            self._mend(error)
            raise

    # The others.

    async def run(
        self, work: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs some work on the cursor; if the file is locked, until time is over."""
        try:
            return self.once(work, *args, **kwargs)
        except sqlite3.Error as error:
            return await self._again(error, float("inf"), work, *args, **kwargs)

    async def transact(
        self,
        until: float,
        work: Callable[Concatenate[sqlite3.Cursor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Runs some work as one writing transaction, by ``until`` at the latest."""
        try:
            return self.once(_transaction, work, args, kwargs)
        except sqlite3.Error as error:
            return await self._again(error, until, _transaction, work, args, kwargs)

    def once(
        self, work: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs some work on the cursor. Raises SQLite's errors as they are."""
        try:
            with self._mutex:
                cursor = self._ready()
                self._torn = True
                result = work(cursor, *args, **kwargs)
                self._torn = False
                self.ran += 1
                if self.file_at_path() != self.file:
                    raise FileReplaced
                return result
        except UnicodeDecodeError as error:
            self._mend(Garbled())
            raise Garbled from error
        except BaseException as error:
            self._mend(error)
            raise

    async def _again(
        self,
        error: sqlite3.Error,
        until: float,
        work: Callable[Concatenate[sqlite3.Cursor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        until = min(until, self._runtime.now() + self._seconds)
        pause = SHORTEST_PAUSE_SECONDS
        relieved = False
        while True:
            if _code(error) == sqlite3.SQLITE_FULL and not relieved:
                relieved = self._relieve()
            elif not _is_busy(error) or self._runtime.now() >= until:
                raise self._explained(error) from error
            else:
                await self._runtime.sleep(pause * clock.between(0.5, 1.5))
                pause = min(pause * 1.6, LONGEST_PAUSE_SECONDS)
            try:
                return self.once(work, *args, **kwargs)
            except sqlite3.Error as again:
                error = again

    def _relieve(self) -> bool:
        """A full disk may have room inside the file still: to renew and to release."""
        with suppress(sqlite3.Error):
            self.once(self._relief)
        return True

    def _ready(self) -> sqlite3.Cursor:
        if self._unusable:
            raise BackendUnavailable(self._unusable)
        if self._torn:
            self._mend(None)
        if self._connection is None:
            self._open()
            assert self._connection is not None
        if self._cursor is None:
            self._cursor = self._connection.cursor()
        return self._cursor

    def _open(self) -> None:
        if self._opening:
            raise BackendUnavailable(
                f"{self.path} is just being opened, by what this signal handler interrupted"
            )
        self._opening = True
        try:
            self._connection, self.file = self._opener()
            self._pin = _Pin(self.path)  # the old one's ends here, and not before
        finally:
            self._opening = False

    def file_at_path(self) -> FileId | None:
        """The file that others would open now."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _mend(self, error: BaseException | None) -> None:
        """Ends what was cut short: an open transaction, a statement that was not read to its end,
        and after a failure of the file's the connection itself."""
        with self._mutex:
            cursor, self._cursor = self._cursor, None
            if cursor is not None:
                cursor.close()
            if self._connection is not None and self._connection.in_transaction:
                self._connection.rollback()
            self._torn = False
            if isinstance(error, sqlite3.Error) and not _is_passing(error):
                self.drop()

    def drop(self) -> None:
        """Closes the connection; the next request opens another."""
        with self._mutex:
            connection, self._connection, self._cursor = self._connection, None, None
            if connection is not None:
                connection.close()

    def close(self) -> None:
        """The end. Of the process too, maybe: a short log is then left as it is. The next who
        opens the file reads it, as after a crash, in less time than it takes us to copy it."""
        with self._mutex:
            if self._connection is not None and lifetime.leaving() and self._log_is_short():
                _never_closed.append(self._connection)
                self._connection = self._cursor = None
            self.drop()
            self._pin = None
        _open_wires.discard(self)

    def _log_is_short(self) -> bool:
        try:
            return os.stat(f"{self.path}-wal").st_size <= LONGEST_LEFT_BYTES
        except OSError:
            return False

    # Fork: see above.

    def hold_still(self) -> bool:
        """Before a fork; false if a request is stuck."""
        return self._mutex.acquire(timeout=FORK_SECONDS)

    def go_on(self) -> None:
        """After a fork, in the parent."""
        self._mutex.release()

    def inherit(self) -> None:
        """After a fork, in the child."""
        self._mutex = threading.RLock()
        self.forget()

    def forget(self) -> None:
        """Closes what was inherited; see above why."""
        if self._torn and self._connection is not None:
            _never_closed.append(self._connection)
            self._connection = self._cursor = None
            self._unusable = f"{self.path} can't be used in this process: it forked in a request"
        self.drop()
        self._torn = False

    def _explained(self, error: sqlite3.Error) -> HoldfastError:
        code, primary = getattr(error, "sqlite_errorcode", 0), _code(error)
        if _is_busy(error) and primary:
            return BackendUnavailable(
                f"{self.path} was locked for {self._seconds:g} s by {self._writer()}: "
                "stopped in the middle of a transaction?"
            )
        if primary in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return Incompatible(
                f"{self.path} is damaged or no store of locks ({error}): move it away while "
                "nobody uses it; tokens go on from the clock"
            )
        if primary == sqlite3.SQLITE_READONLY:
            return Unsupported(f"{self.path} can't be written: it is read-only ({error})")
        if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
            return BackendUnavailable(f"{self.path} can't be written: the disk is full ({error})")
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        return BackendUnavailable(f"{self.path} can't be used: {error} ({name})")

    def _writer(self) -> str:
        """Who has the write lock, as far as the system tells."""
        try:
            inode = str(os.stat(f"{self.path}-shm").st_ino)
            with open("/proc/locks") as file:
                locks = file.read()
            for line in locks.splitlines():
                fields = line.split()
                if (
                    fields[3] == "WRITE"
                    and fields[5].endswith(f":{inode}")
                    and (fields[6] == WRITE_LOCK_BYTE)
                ):
                    return f"the process {fields[4]}"
        except (OSError, IndexError):
            pass
        return "another process"


def _transaction(
    cursor: sqlite3.Cursor,
    work: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T:
    cursor.execute("BEGIN IMMEDIATE")
    result = work(cursor, *args, **kwargs)
    cursor.execute("COMMIT")
    return result


def _code(error: sqlite3.Error) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _is_busy(error: sqlite3.Error) -> bool:
    """Whether another try is worth it: the file is locked, or another one by now, or a signal
    handler that struck in the middle of a transaction has undone it for a request of its own."""
    if isinstance(error, sqlite3.ProgrammingError | FileReplaced):
        return True
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def _is_passing(error: sqlite3.Error) -> bool:
    """Whether the connection is as good as before."""
    if isinstance(error, FileReplaced):
        return False
    return _is_busy(error) or _code(error) == sqlite3.SQLITE_FULL


_open_wires: WeakSet[SqliteWire] = WeakSet()
_never_closed: list[sqlite3.Connection] = []
_still: list[tuple[SqliteWire, bool]] = []


def _before_fork() -> None:
    _still[:] = [(wire, wire.hold_still()) for wire in list(_open_wires)]


def _after_in_parent() -> None:
    for wire, still in _still:
        if still:
            wire.go_on()
    _still.clear()


def _after_in_child() -> None:
    for wire, _ in _still:
        wire.inherit()
    _still.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )

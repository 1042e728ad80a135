"""One SQLite connection, used by many threads, that never blocks for long.

SQLite's own busy handler is off: a request that finds the file locked sleeps for a moment through
the runtime and tries again, so the same code serves threads and event loops. A whole request runs
under one mutex and never suspends in between. SQLite's errors are mapped to Holdfast's here.

The file may be removed or replaced while it is open. Other processes do not see what is written to
the old file. So after every request (except the release of a short hold) the file at the path is
compared with the open one; if they differ, the request is repeated on the new file. A file is
identified by its inode number, and a file system may reuse the number of a removed file. An open
descriptor (``_InodePin``) keeps the old number in use until the next file is open.

Fork. SQLite records per process which locks it has on a file. A forked child inherits the record
without the locks: a second connection beside an inherited one would take no locks, and would lose
its writes when the parent closes the file. So the child closes its inherited connections first.
The parent keeps its locks. The mutexes are held across the fork, so that no inherited connection is
in the middle of a request.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

from holdfast.core.backoff import BUSY_FILE_JITTER
from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable, HoldfastError, Incompatible, Unsupported
from holdfast.io import clock, lifetime

__all__ = ["FileId", "SqliteConnection", "may_have_run"]

P = ParamSpec("P")
T = TypeVar("T")

SHORTEST_PAUSE_SECONDS = 0.00003
LONGEST_PAUSE_SECONDS = 0.004
PAUSE_GROWTH = 1.6
FORK_SECONDS = 1.0
LONGEST_LEFT_BYTES = 256 << 10
"""The longest log that is left at exit: dozens of commands, and half a millisecond to read."""
WRITE_LOCK_BYTE = "120"  # of the -shm file: part of SQLite's file format


FileId = tuple[int, int]
"""Device and inode number of a file."""


class FileReplaced(sqlite3.OperationalError):
    """The request ran in a file that is no longer the one at the path."""

    def __init__(self) -> None:
        super().__init__("it was removed or replaced while it was in use")


class Garbled(sqlite3.DatabaseError):
    """Stands for an error of SQLite whose message has bytes of the file that are not UTF-8."""

    def __init__(self) -> None:
        super().__init__("its tables can't be read")
        self.sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class _InodePin:
    """Keeps the inode number of a file in use (Linux). Unlike other descriptors, this one releases
    none of the file's locks when it is closed, also by a forked child."""

    def __init__(self, path: str) -> None:
        self._handle: int | None = None
        if hasattr(os, "O_PATH"):
            with suppress(OSError):
                self._handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._handle is not None:
            close(self._handle)


class SqliteConnection:
    """A connection that is opened at its first request, and again after a failure."""

    def __init__(
        self,
        path: str,
        opener: Callable[[], tuple[sqlite3.Connection, FileId]],
        free_space: Callable[[sqlite3.Cursor], object],
        runtime: Runtime,
        seconds: float,
    ) -> None:
        self.path, self.ran = path, 0
        self._opener, self._free_space = opener, free_space
        self._runtime, self._seconds = runtime, seconds
        # Re-entrant: a signal handler or a destructor may run in the middle of a request.
        self._mutex = threading.RLock()
        self._database: sqlite3.Connection | None = None
        self._cursor: sqlite3.Cursor | None = None
        self.file_id: FileId | None = None
        """The open file: what ``opener`` found at the path before it opened it."""
        self._pin: _InodePin | None = None
        self._interrupted = self._opening = self._closed = False
        self._unusable = ""
        _open_connections.add(self)

    # The fast path: one statement, with as few steps around it as possible.

    def change(
        self, statement: str, parameters: tuple[object, ...], *, verify: bool = True
    ) -> FileId | None:
        """Runs one statement. Returns the file in which it changed a row; ``None`` if it changed
        none. Raises SQLite's errors as they are. ``verify`` checks that the file is still the one
        at the path; only a statement that grants nothing may do without."""
        try:
            with self._mutex:
                cursor = self._cursor
                if cursor is None or self._interrupted:
                    cursor = self._ready()
                self._interrupted = (
                    True  # stays set if anything ends it early, also an interrupt right here
                )
                changed = cursor.execute(statement, parameters).rowcount
                self._interrupted = False
                self.ran += 1
                if verify and self.file_at_path() != self.file_id:
                    raise FileReplaced
                return self.file_id if changed else None
        except UnicodeDecodeError as error:
            self._recover(Garbled())
            raise Garbled from error
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            if self._closed:
                self.drop()

    # Other requests.

    async def run(
        self, work: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs ``work`` on the cursor; while the file is locked, again until the time is over."""
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
        """Runs ``work`` as one writing transaction, by ``until`` at the latest."""
        try:
            return self.once(_transaction, work, args, kwargs)
        except sqlite3.Error as error:
            return await self._again(error, until, _transaction, work, args, kwargs)

    def once(
        self, work: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs ``work`` on the cursor once. Raises SQLite's errors as they are."""
        try:
            with self._mutex:
                cursor = self._ready()
                self._interrupted = True
                result = work(cursor, *args, **kwargs)
                self._interrupted = False
                self.ran += 1
                if self.file_at_path() != self.file_id:
                    raise FileReplaced
                return result
        except UnicodeDecodeError as error:
            self._recover(Garbled())
            raise Garbled from error
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            if self._closed:
                self.drop()

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
        freed = False
        while True:
            if _code(error) == sqlite3.SQLITE_FULL and not freed:
                freed = self._try_to_free_space()
            elif not _is_busy(error) or self._runtime.now() >= until:
                raise self._explained(error) from error
            else:
                await self._runtime.sleep(pause * clock.between(*BUSY_FILE_JITTER))
                pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE_SECONDS)
            try:
                return self.once(work, *args, **kwargs)
            except sqlite3.Error as again:
                error = again

    def _try_to_free_space(self) -> bool:
        """On a full disk, makes pages inside the file usable, so that holds can be renewed and
        released."""
        with suppress(sqlite3.Error):
            self.once(self._free_space)
        return True

    def _ready(self) -> sqlite3.Cursor:
        if self._unusable:
            raise BackendUnavailable(self._unusable)
        if self._interrupted:
            self._recover(None)
        if self._database is None:
            self._open()
            assert self._database is not None
        if self._cursor is None:
            self._cursor = self._database.cursor()
        return self._cursor

    def _open(self) -> None:
        if self._opening:
            raise BackendUnavailable(
                f"{self.path} is being opened by the code that this signal handler interrupted"
            )
        self._opening = True
        try:
            self._database, self.file_id = self._opener()
            self._pin = _InodePin(self.path)  # the old pin ends here, and not before
        finally:
            self._opening = False

    def file_at_path(self) -> FileId | None:
        """The file that another process would open now; ``None`` if there is none."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _recover(self, error: BaseException | None) -> None:
        """Cleans up after an interrupted request: ends an open transaction and an unfinished
        statement, and closes the connection after an error of the file."""
        with self._mutex:
            cursor, self._cursor = self._cursor, None
            if cursor is not None:
                cursor.close()
            if self._database is not None and self._database.in_transaction:
                self._database.rollback()
            self._interrupted = False
            if isinstance(error, sqlite3.Error) and not _keeps_connection(error):
                self.drop()

    def drop(self) -> None:
        """Closes the connection; the next request opens another."""
        with self._mutex:
            connection, self._database, self._cursor = self._database, None, None
            if connection is not None:
                connection.close()
            if self._closed:
                self._pin = None

    def close(self) -> None:
        """Closes the connection for good. A request that comes later, such as the undo of an
        acquire of another thread, opens the file for itself alone.

        At the exit of the process a short log is left as it is: the next process reads it, as after
        a crash, in less time than a checkpoint takes."""
        with self._mutex:
            self._closed = True
            if self._database is not None and lifetime.leaving() and self._log_is_short():
                _never_closed.append(self._database)
                self._database = self._cursor = None
            self.drop()

    def _log_is_short(self) -> bool:
        try:
            return os.stat(f"{self.path}-wal").st_size <= LONGEST_LEFT_BYTES
        except OSError:
            return False

    # Fork: see the docstring of this module.

    def before_fork(self) -> bool:
        """Takes the mutex. False if a request keeps it for too long."""
        return self._mutex.acquire(timeout=FORK_SECONDS)

    def after_fork_in_parent(self) -> None:
        """Releases the mutex."""
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        """Replaces the mutex and closes the inherited connection."""
        self._mutex = threading.RLock()
        self.forget()

    def forget(self) -> None:
        """Closes the inherited connection; see the docstring of this module for the reason."""
        if self._interrupted and self._database is not None:
            _never_closed.append(self._database)
            self._database = self._cursor = None
            self._unusable = (
                f"{self.path} can't be used in this process: it was forked during a request"
            )
        self.drop()
        self._interrupted = False

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
                "no program uses it; tokens continue from the clock"
            )
        if primary == sqlite3.SQLITE_READONLY:
            return Unsupported(f"{self.path} can't be written: it is read-only ({error})")
        if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
            return BackendUnavailable(f"{self.path} can't be written: the disk is full ({error})")
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        return BackendUnavailable(f"{self.path} can't be used: {error} ({name})")

    def _writer(self) -> str:
        """The process that has the write lock, if the system shows it."""
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
    """Whether another try may succeed: the file is locked, or was replaced, or a signal handler in
    the middle of a transaction has rolled it back for a request of its own."""
    if isinstance(error, sqlite3.ProgrammingError | FileReplaced):
        return True
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def may_have_run(error: sqlite3.Error) -> bool:
    """Whether a statement may have taken effect although it ended with this error: reading or
    writing the file failed, perhaps after the commit."""
    return _code(error) == sqlite3.SQLITE_IOERR


def _keeps_connection(error: sqlite3.Error) -> bool:
    """Whether the connection can still be used after this error."""
    if isinstance(error, FileReplaced):
        return False
    return _is_busy(error) or _code(error) == sqlite3.SQLITE_FULL


_open_connections: WeakSet[SqliteConnection] = WeakSet()
_never_closed: list[sqlite3.Connection] = []
_stopped: list[tuple[SqliteConnection, bool]] = []


def _before_fork() -> None:
    _stopped[:] = [(connection, connection.before_fork()) for connection in list(_open_connections)]


def _after_fork_in_parent() -> None:
    for connection, stopped in _stopped:
        if stopped:
            connection.after_fork_in_parent()
    _stopped.clear()


def _after_fork_in_child() -> None:
    for connection, _ in _stopped:
        connection.after_fork_in_child()
    _stopped.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )

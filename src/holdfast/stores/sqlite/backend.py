"""The store and its backend: transactions on one file.

An uncontended exclusive acquire is one statement, and so is its release. As soon as a name has
other claims, ``queue.NameQueue`` decides, inside a writing transaction.

Maintenance. A backend sometimes copies the log into the file (a checkpoint) and purges idle names.
The checkpoint runs on a second connection while the first one has the write lock: up to SQLite
3.51.2 a checkpoint may damage the file if another connection restarts the log at the same time.
With the write lock held, no other connection can restart the log, and none can run a checkpoint.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core import log
from holdfast.core.backoff import WATCH_POLL_SECONDS
from holdfast.core.contract import (
    IDLE_COUNTER_SECONDS,
    Finding,
    Guarantee,
    Page,
    Renewal,
    Runtime,
    Settings,
    Waiting,
)
from holdfast.core.drive import run_now
from holdfast.errors import HoldfastError, Incompatible
from holdfast.io.clock import now as now_seconds
from holdfast.io.clock import wall as wall_seconds
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.sqlite.connection import FileId, SqliteConnection, may_have_run
from holdfast.stores.sqlite.file import StoreFile
from holdfast.stores.sqlite.row import Unreadable, damaged
from holdfast.stores.sqlite.schema import WAL_DUE_BYTES, note_clock, open_file, raise_high, synced

if TYPE_CHECKING:  # loaded at the first contended request
    from holdfast.stores.sqlite.queue import NameQueue, Wakeup
    from holdfast.stores.sqlite.wakeups import SqliteWakeups

__all__ = ["LATER", "SqliteBackend", "SqliteStore"]

T = TypeVar("T")
SEPARATOR = "\x1f"  # neither names nor namespaces may contain it
MOST_TRIES = 1000
KEPT_CONTENDED = 1024
SHORT_MICROSECONDS = 5_000
"""After a hold of at most this length, a release does not check again that the file is still at its
path: the grant has checked, and another check would be a tenth of the cost of such a hold."""
NEVER = float("inf")
LATER = (
    "holdfast.stores.sqlite.queue",
    "holdfast.stores.sqlite.inspect",
    "holdfast.stores.sqlite.wakeups",
)
"""Modules that are needed only if a name is contended or inspected. ``locks.connect`` loads them in
advance, a command does not."""
EXCLUSIVE = Mode.EXCLUSIVE  # looking up a member of an enumeration is slow

# The stored column ``crowd`` counts the rows of the name in ``claim``.
# Changes no row if the name is not free, or if the token is not above its last one: then
# ``NameQueue`` decides.
_TAKE = (
    "INSERT INTO name VALUES (?, ?, ?, ?, ?, ?, 0) ON CONFLICT (name) DO UPDATE SET "
    "token = excluded.token, owner = excluded.owner, label = excluded.label, "
    "since = excluded.since, ends = excluded.ends "
    "WHERE crowd = 0 AND ends <= ? AND token < excluded.token"
)
_FREE = (
    "UPDATE name SET owner = '', ends = 0 WHERE name = ? AND owner = ? AND ends > ? AND crowd = 0"
)
# First whether an end may become an earlier one; then the end, twice.
_RENEW_ALONE = (
    "UPDATE name SET ends = iif(?, ?, max(ends, ?)) WHERE name = ? AND owner = ? AND ends > ?"
)
_RENEW_SHARED = (
    "UPDATE claim SET ends = iif(?, ?, max(ends, ?)) "
    "WHERE name = ? AND owner = ? AND ends > ? AND token > 0"
)
_HOLDS = (
    "SELECT 1 FROM name WHERE name = ? AND owner = ? AND ends > ? UNION ALL "
    "SELECT 1 FROM claim WHERE name = ? AND owner = ? AND ends > ? AND token > 0"
)
_ADDRESSES = "SELECT DISTINCT address FROM claim WHERE name = ? AND token = 0 AND address <> ''"
_GONE = "it ran out or was broken, and is no longer stored"


MAINTENANCE_TRANSACTIONS = 256
"""How many transactions a backend runs before it checks whether maintenance is due."""
PURGED_ROWS = 4 * MAINTENANCE_TRANSACTIONS  # a multiple of the names that can be added in between

_IDLE = "since < ? AND ends <= ? AND crowd = 0 AND token < ?"
_SCAN = f"SELECT name, {_IDLE} FROM name WHERE name > ? ORDER BY name LIMIT {PURGED_ROWS}"  # noqa: S608
_FORGET = f"DELETE FROM name WHERE {_IDLE} AND name = ?"  # noqa: S608
_FORGET_RECORDS = (
    "DELETE FROM record WHERE name IN "  # noqa: S608
    f"(SELECT name FROM record WHERE until < ? LIMIT {PURGED_ROWS})"
)


class SqliteBackend:
    """Admits claims in one file."""

    def __init__(self, store: SqliteStore, runtime: Runtime) -> None:
        self._store, self._runtime = store, runtime
        self._space = store.namespace + SEPARATOR
        path = store.file.path
        free_space = partial(checkpoint, path=path)
        self._connection = SqliteConnection(
            path, self._open, free_space, runtime, store.request_seconds
        )
        self._replaced = f"{path} was removed or replaced while it was held"
        self._own_wakeups: list[SqliteWakeups] = []
        self._floor = self._high = self._last = 0
        self._contended: set[str] = set()
        self._maintain_at = MAINTENANCE_TRANSACTIONS

    def _open(self) -> tuple[sqlite3.Connection, FileId]:
        connection, file, marks = open_file(self._store.file, self._store.adopt)
        self._floor, self._high = marks
        self._last = max(self._last, self._floor - 1)
        if log_is_due(self._store.file.path):
            self._maintain_at = 0  # else many short-lived programs would never do it
        return connection, file

    @property
    def _wakeups(self) -> SqliteWakeups:
        if not self._own_wakeups:
            from holdfast.stores.sqlite.wakeups import SqliteWakeups

            # Two threads may both append one: all threads use the first in the list.
            self._own_wakeups.append(SqliteWakeups(self._store.file, self._runtime))
        return self._own_wakeups[0]

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        name = self._space + claim.name
        if not self._high:
            await self._connection.run(_read_meta)  # reads the marks, and makes the folder
        if claim.mode is EXCLUSIVE and name not in self._contended:
            now, wall = now_seconds(), wall_seconds()
            token = int(wall * 1_000_000)
            if token <= self._last:  # the clock went back, or is behind the floor
                token = self._last + 1
            row = (name, token, claim.owner, claim.label, wall, now + claim.ttl, now)
            try:
                file = self._connection.change(_TAKE, row)
                if file is not None:
                    self._last = token
                    grant = Grant(claim, token, ref=file)
                    return grant if token < self._high else await self._granted(grant)
            except sqlite3.Error:  # most likely the file is locked: a transaction waits for it
                pass
        return await self._attempt(name, claim, join, NEVER if until is None else until)

    async def _attempt(self, name: str, claim: Claim, join: bool, until: float) -> Grant | Busy:
        address = self._wakeups.address() if join else ""
        answer: Grant | Busy = Busy(0)
        for _ in range(MOST_TRIES):
            answer, skipped = await self._change(
                name, lambda at: self._admit(at, claim, join), address, until
            )
            if isinstance(answer, Grant):
                return await self._granted(answer)
            if not skipped:  # else dead waiters in front were removed: try again
                break
        return answer

    def _admit(self, queue: NameQueue, claim: Claim, join: bool) -> Grant | Busy:
        """An attempt, inside the transaction."""
        answer = queue.attempt(claim, join)
        return self._in_this_file(answer) if isinstance(answer, Grant) else answer

    def _in_this_file(self, grant: Grant) -> Grant:
        """A grant refers to the file that it is stored in."""
        return grant._replace(ref=self._connection.file_id)

    async def _granted(self, grant: Grant) -> Grant:
        """Raises the synced mark above the token first if need be: see ``schema``."""
        self._last = max(self._last, grant.token)
        if grant.token >= self._high:
            self._high = await self._connection.run(raise_high, grant.token, self._connection.path)
        self._drop_wakeup(grant.claim)
        return grant

    def _drop_wakeup(self, claim: Claim) -> None:
        """Drops a wake-up of a claim that does not wait any more."""
        for wakeups in self._own_wakeups:
            wakeups.drop(claim.owner)

    async def _change(
        self, name: str, work: Callable[[NameQueue], T], address: str = "", until: float = NEVER
    ) -> tuple[T, bool]:
        """Changes a name in one transaction, and wakes the waiters that can enter now.

        Returns the result of ``work``, and whether dead waiters were removed from the queue."""
        result, wakeups = await self._connection.transact(until, self._work, name, work, address)
        return result, await self._wake(name, wakeups) if wakeups else False

    def _work(
        self, cursor: sqlite3.Cursor, name: str, work: Callable[[NameQueue], T], address: str
    ) -> tuple[T, list[Wakeup]]:
        from holdfast.stores.sqlite.queue import NameQueue, RequestContext

        context = RequestContext(
            now_seconds(), wall_seconds(), self._floor, address, self._store.display
        )
        try:
            queue = NameQueue(cursor, name, context)
            result = work(queue)
            queue.write_back()
        except Unreadable as error:
            raise self._damaged(name, error) from error
        if not queue.entries:
            self._contended.discard(name)
        elif name not in self._contended:
            if len(self._contended) >= KEPT_CONTENDED:
                self._contended.clear()
            self._contended.add(name)
        return result, queue.wakeups

    def _damaged(self, key: str, error: Unreadable) -> Incompatible:
        return damaged(key.removeprefix(self._space), self._store.display, error)

    async def _wake(self, name: str, wakeups: list[Wakeup]) -> bool:
        for tries in range(MOST_TRIES):
            dead = await self._wakeups.deliver(wakeups)
            if not dead:
                return tries > 0
            # Other waiters of a dead client, and waiters behind it, may be dead as well.
            dead |= self._wakeups.dead_among(await self._connection.run(_addresses, name))
            skip = partial(_skip, addresses=dead)
            _, wakeups = await self._connection.transact(NEVER, self._work, name, skip, "")
        return True

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        await self._wakeups.wait(claim.owner, until)

    def nudge(self, claim: Claim) -> None:
        for wakeups in self._own_wakeups:
            wakeups.wake(claim.owner)

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        def swap(queue: NameQueue) -> tuple[bool, Grant | Busy]:
            return queue.release(grant.claim.owner), self._admit(queue, claim, join=True)

        name, address = self._space + claim.name, self._wakeups.address()
        (ours, answer), _ = await self._change(name, swap, address)
        if isinstance(answer, Grant):
            await self._granted(answer)
        await self._maintain_if_due()
        return ours, answer

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        renewal, wakeups = await self._connection.transact(
            until, self._renew, grants, waits, shorten
        )
        for name, woken in wakeups.items():
            await self._wake(name, woken)
        await self._maintain_if_due()
        return renewal

    def _renew(
        self,
        cursor: sqlite3.Cursor,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        shorten: bool,
    ) -> tuple[Renewal, dict[str, list[Wakeup]]]:
        lost: dict[str, str] = {}
        now = now_seconds()
        for grant in grants:
            claim = grant.claim
            if grant.ref != self._connection.file_id:
                lost[claim.owner] = self._replaced
                continue
            statement = _RENEW_ALONE if claim.mode is EXCLUSIVE else _RENEW_SHARED
            name = self._space + claim.name
            ends = now + claim.ttl
            row = (shorten, ends, ends, name, claim.owner, now)
            if not cursor.execute(statement, row).rowcount:
                lost[claim.owner] = _GONE
        forgotten: set[str] = set()
        wakeups: dict[str, list[Wakeup]] = {}
        for claim, behind in waits:
            name = self._space + claim.name
            refresh = partial(_refresh, owner=claim.owner, behind=behind)
            try:
                waits_still, woken = self._work(cursor, name, refresh, "")
            except Incompatible:  # its next attempt raises this; the others are renewed
                waits_still, woken = False, []
            if not waits_still:
                forgotten.add(claim.owner)
            if woken:
                wakeups[name] = woken
        return Renewal(lost, forgotten=frozenset(forgotten)), wakeups

    async def release(self, grant: Grant) -> bool | None:
        claim = grant.claim
        name = self._space + claim.name
        freed = unknown = False
        if claim.mode is EXCLUSIVE and name not in self._contended:
            try:
                row = (name, claim.owner, now_seconds())
                verify = wall_seconds() * 1_000_000 > grant.token + SHORT_MICROSECONDS
                freed = self._connection.change(_FREE, row, verify=verify) is not None
            except sqlite3.Error as error:  # most likely the file is locked: a transaction waits
                unknown = may_have_run(error)
        if not freed:
            freed, _ = await self._change(name, lambda queue: queue.release(claim.owner))
        if self._connection.ran >= self._maintain_at:
            await self._maintain_if_due()
        return None if unknown and not freed else freed

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        return ()  # a hold ends with its ttl, whatever becomes of its process

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        def take(queue: NameQueue) -> Grant | None:
            taken = queue.take_over(grant.claim.owner, grant.token, claim)
            return None if taken is None else self._in_this_file(taken)

        taken, _ = await self._change(self._space + claim.name, take, until=until)
        return None if taken is None else await self._granted(taken)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        name, by = self._space + claim.name, NEVER if until is None else until
        await self._change(name, lambda queue: queue.abandon(claim.owner), until=by)
        self._drop_wakeup(claim)

    async def revoke(self, name: str) -> list[int]:
        tokens, _ = await self._change(self._space + name, lambda queue: queue.clear())
        return tokens

    async def look(self, name: str) -> LockInfo:
        from holdfast.stores.sqlite import inspect

        key = self._space + name
        try:
            return await self._connection.run(inspect.look, key, name, now_seconds())
        except Unreadable as error:
            raise self._damaged(key, error) from error

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        from holdfast.stores.sqlite import inspect

        now = now_seconds()
        return await self._connection.run(
            inspect.survey, self._space, prefix, cursor or "", limit, now
        )

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        return await self._connection.run(self._record, grant, value, keep_seconds)

    def _record(
        self, cursor: sqlite3.Cursor, grant: Grant, value: str, keep_seconds: float
    ) -> bool:
        name, wall = self._space + grant.claim.name, wall_seconds()
        with synced(cursor):
            cursor.execute("BEGIN IMMEDIATE")
            hold = (name, grant.claim.owner, now_seconds())
            held = cursor.execute(_HOLDS, (*hold, *hold)).fetchone()
            if held:
                until = wall + keep_seconds
                row = (name, value, grant.token, wall, until)
                cursor.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?)", row)
            cursor.execute("COMMIT")
        return held is not None

    async def recall(self, name: str) -> Record | None:
        from holdfast.stores.sqlite import inspect

        key = self._space + name
        try:
            return await self._connection.run(inspect.recall, key, wall_seconds())
        except Unreadable as error:
            raise self._damaged(key, error) from error

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        left = until - self._runtime.now()
        await self._runtime.sleep(max(0.0, min(left, self._runtime.between(*WATCH_POLL_SECONDS))))

    async def probe(self) -> list[Finding]:
        from holdfast.stores.sqlite import inspect

        return await self._connection.run(inspect.probe, self._store.file)

    async def _maintain_if_due(self) -> None:
        """Does the maintenance if it is due; never on the thread of an event loop."""
        if self._connection.ran < self._maintain_at:
            return
        self._maintain_at = self._connection.ran + MAINTENANCE_TRANSACTIONS
        if self._runtime.blocking:
            self.maintain()
        else:
            import asyncio

            await asyncio.to_thread(self._store.maintain)

    def maintain(self) -> None:
        """Purges idle names, and copies the log if it is long. Postponed if the file is locked."""
        path = self._store.file.path
        try:
            self._connection.once(purge, now_seconds(), wall_seconds())
            if log_is_due(path):
                self._connection.once(checkpoint, path)
        except (sqlite3.Error, HoldfastError) as error:
            log.debug("%s: maintenance postponed: %s", self._store.display, error)

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Holds in a file that is no longer the one at the path."""
        file = self._connection.file_at_path()
        return {grant.claim.owner: self._replaced for grant in grants if grant.ref != file}

    def forget(self) -> None:
        self._connection.forget()
        for wakeups in self._own_wakeups:
            wakeups.forget()
        self._contended.clear()

    async def close(self) -> None:
        for wakeups in self._own_wakeups:
            wakeups.close()
        self._connection.close()


def _read_meta(cursor: sqlite3.Cursor) -> None:
    cursor.execute("SELECT 1 FROM meta").fetchall()


def _skip(queue: NameQueue, addresses: set[str]) -> None:
    queue.skip(addresses)


def _refresh(queue: NameQueue, owner: str, behind: int) -> bool:
    return queue.refresh(owner, behind)


def _addresses(cursor: sqlite3.Cursor, name: str) -> list[str]:
    rows = cursor.execute(_ADDRESSES, (name,)).fetchall()
    return [address for (address,) in rows if isinstance(address, str)]


class SqliteStore:
    """The locks of one file, for one client."""

    guarantees = frozenset(
        {
            Guarantee.EXCLUSIVE,
            Guarantee.SHARED,
            Guarantee.SLOTS,
            Guarantee.FIFO,
            Guarantee.FENCED,
            Guarantee.RECORDS,
        }
    )
    shortest_ttl = 0.05
    longest_ttl = 10 * 366 * 24 * 3600.0
    whole_seconds = False

    def __init__(self, file: StoreFile, settings: Settings, *, adopt: bool = False) -> None:
        self.file, self.adopt = file, adopt
        self.namespace, self.request_seconds = settings.namespace, settings.request_seconds
        self.display = f"sqlite://{file.path}"

    def backend(self, runtime: Runtime) -> SqliteBackend:
        return SqliteBackend(self, runtime)

    def maintain(self) -> None:
        """Does the maintenance over a connection of its own, from any thread."""
        backend = self.backend(BlockingRuntime())
        backend.maintain()
        run_now(backend.close())


def log_is_due(path: str) -> bool:
    """Whether the log is so long that it should be copied into the file."""
    try:
        return os.stat(f"{path}-wal").st_size > WAL_DUE_BYTES
    except OSError:
        return False


def checkpoint(cursor: sqlite3.Cursor, path: str) -> bool:
    """Copies the log into the file, so that the next writer restarts it. True if all of it was
    copied."""
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
    """Deletes some names that were unused for a week, and expired records. Returns how many names.

    A name is deleted only after the clock has passed its last token, so that tokens keep growing.
    """
    idle = (wall - IDLE_COUNTER_SECONDS, now, int(wall * 1_000_000))
    (hand,) = cursor.execute("SELECT hand FROM meta").fetchone() or ("",)
    rows = cursor.execute(_SCAN, (*idle, hand)).fetchall()
    gone = [name for name, is_idle in rows if is_idle]
    cursor.execute("BEGIN IMMEDIATE")
    for name in gone:
        cursor.execute(_FORGET, (*idle, name))
    cursor.execute(_FORGET_RECORDS, (wall,))
    cursor.execute("UPDATE meta SET hand = ?", (rows[-1][0] if len(rows) == PURGED_ROWS else "",))
    note_clock(cursor)
    cursor.execute("COMMIT")
    return len(gone)

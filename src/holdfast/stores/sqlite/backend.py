"""``local`` and ``sqlite:///path``: locks of one machine, in a file that needs no server.

An uncontended exclusive acquire is one statement, a release another; both give way to ``Line``
as soon as anybody else is there. Beside this file: ``sqlite_schema`` (what is stored),
``sqlite_row`` (how that is read), ``sqlite_line`` (admission), ``sqlite_wakes``,
``sqlite_view``, ``sqlite_chores``, ``sqlite_file`` and ``sqlite_host`` (where the file may be).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core import log
from holdfast.core.contract import Finding, Guarantee, Page, Renewal, Runtime, Settings, Waiting
from holdfast.core.drive import run_now
from holdfast.errors import HoldfastError, Incompatible
from holdfast.io.clock import now as now_seconds
from holdfast.io.clock import wall as wall_seconds
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.sqlite import chores
from holdfast.stores.sqlite.connection import FileId, SqliteWire
from holdfast.stores.sqlite.file import Place, place_of
from holdfast.stores.sqlite.row import Unreadable, damaged
from holdfast.stores.sqlite.schema import open_file, raise_high, synced
from holdfast.url import Url

if TYPE_CHECKING:  # most programs never meet a rival, so they never load this
    from holdfast.stores.sqlite.queue import Line, Wake
    from holdfast.stores.sqlite.wakeups import Wakes

__all__ = ["SqliteBackend", "SqliteStore", "open_store"]

T = TypeVar("T")
SEPARATOR = "\x1f"  # no name and no namespace contains it
MOST_TRIES = 1000
KEPT_CROWDED = 1024
SHORT_MICROSECONDS = 5_000
"""A hold that was so short is released without another look whether its file is still there: the
grant had one, and this one would be a tenth of what such a hold costs."""
NEVER = float("inf")
LATER = (
    "holdfast.stores.sqlite.queue",
    "holdfast.stores.sqlite.inspect",
    "holdfast.stores.sqlite.wakeups",
)
"""Modules that a command without rivals never loads."""
EXCLUSIVE = Mode.EXCLUSIVE  # looking up a member of an enumeration takes its time

# A token that is not above the name's last one is left to Line, as is a name that is not free.
_TAKE = (
    "INSERT INTO name VALUES (?1, ?2, ?3, ?4, ?5, ?6, 0) ON CONFLICT (name) DO UPDATE SET "
    "token = ?2, owner = ?3, label = ?4, since = ?5, ends = ?6 "
    "WHERE crowd = 0 AND ends <= ?7 AND token < ?2"
)
_FREE = (
    "UPDATE name SET owner = '', ends = 0 "
    "WHERE name = ?1 AND owner = ?2 AND ends > ?3 AND crowd = 0"
)
# The last one is whether an end that is later is to become the earlier one.
_RENEW_ALONE = (
    "UPDATE name SET ends = iif(?5, ?1, max(ends, ?1)) WHERE name = ?2 AND owner = ?3 AND ends > ?4"
)
_RENEW_SHARED = (
    "UPDATE claim SET ends = iif(?5, ?1, max(ends, ?1)) "
    "WHERE name = ?2 AND owner = ?3 AND ends > ?4 AND token > 0"
)
_HOLDS = (
    "SELECT 1 FROM name WHERE name = ?1 AND owner = ?2 AND ends > ?3 UNION ALL "
    "SELECT 1 FROM claim WHERE name = ?1 AND owner = ?2 AND ends > ?3 AND token > 0"
)
_ADDRESSES = "SELECT DISTINCT address FROM claim WHERE name = ? AND token = 0 AND address <> ''"
_GONE = "it ran out or was broken, and is no longer stored"


class SqliteBackend:
    """Admits claims in one file."""

    def __init__(self, store: SqliteStore, runtime: Runtime) -> None:
        self._store, self._runtime = store, runtime
        self._space = store.namespace + SEPARATOR
        path = store.place.path
        relief = partial(chores.checkpoint, path=path)
        self._wire = SqliteWire(path, self._open, relief, runtime, store.request_seconds)
        self._replaced = f"{path} was removed or replaced while it was held"
        self._own_wakes: list[Wakes] = []
        self._floor = self._high = self._last = 0
        self._crowded: set[str] = set()
        self._chores_at = chores.EVERY

    def _open(self) -> tuple[sqlite3.Connection, FileId]:
        connection, file, marks = open_file(self._store.place, self._store.adopt)
        self._floor, self._high = marks
        self._last = max(self._last, self._floor - 1)
        if chores.log_is_due(self._store.place.path):
            self._chores_at = 0  # many programs that do little each: somebody has to do it
        return connection, file

    @property
    def _wakes(self) -> Wakes:
        if not self._own_wakes:
            from holdfast.stores.sqlite.wakeups import Wakes

            # Where two threads come at once both make one: the first in the list is everybody's.
            self._own_wakes.append(Wakes(self._store.place, self._runtime))
        return self._own_wakes[0]

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        name = self._space + claim.name
        if not self._high:
            await self._wire.run(_look_in)  # the marks must be known, the folder must be there
        if claim.mode is EXCLUSIVE and name not in self._crowded:
            now, wall = now_seconds(), wall_seconds()
            token = int(wall * 1_000_000)
            if token <= self._last:  # the clock went back, or a new boot's is behind the floor
                token = self._last + 1
            row = (name, token, claim.owner, claim.label, wall, now + claim.ttl, now)
            try:
                file = self._wire.change(_TAKE, row)
                if file is not None:
                    self._last = token
                    grant = Grant(claim, token, ref=file)
                    return grant if token < self._high else await self._granted(grant)
            except sqlite3.Error:  # locked, most likely: the long way waits for it
                pass
        return await self._attempt(name, claim, join, NEVER if until is None else until)

    async def _attempt(self, name: str, claim: Claim, join: bool, until: float) -> Grant | Busy:
        address = self._wakes.address() if join else ""
        answer: Grant | Busy = Busy(0)
        for _ in range(MOST_TRIES):
            answer, skipped = await self._change(
                name, lambda at: self._admit(at, claim, join), address, until
            )
            if isinstance(answer, Grant):
                return await self._granted(answer)
            if not skipped:  # else those in front of us were dead
                break
        return answer

    def _admit(self, line: Line, claim: Claim, join: bool) -> Grant | Busy:
        """An attempt, inside the transaction; a grant knows the file that it is in."""
        answer = line.attempt(claim, join)
        return answer._replace(ref=self._wire.file) if isinstance(answer, Grant) else answer

    async def _granted(self, grant: Grant) -> Grant:
        """Lets no token out that a power cut could take back: see ``sqlite_schema``."""
        self._last = max(self._last, grant.token)
        if grant.token >= self._high:
            self._high = await self._wire.run(raise_high, grant.token, self._wire.path)
        self._quiet(grant.claim)
        return grant

    def _quiet(self, claim: Claim) -> None:
        """Drops a wake-up that nobody will ask for."""
        for wakes in self._own_wakes:
            wakes.quiet(claim.owner)

    async def _change(
        self, name: str, work: Callable[[Line], T], address: str = "", until: float = NEVER
    ) -> tuple[T, bool]:
        """Does one thing to a name in one transaction, and wakes whom that lets in.

        Also answers whether somebody in the line turned out to be dead, and was taken out.
        """
        result, wakes = await self._wire.transact(until, self._work, name, work, address)
        return result, await self._wake(name, wakes) if wakes else False

    def _work(
        self, cursor: sqlite3.Cursor, name: str, work: Callable[[Line], T], address: str
    ) -> tuple[T, list[Wake]]:
        from holdfast.stores.sqlite.queue import Line, Moment

        moment = Moment(now_seconds(), wall_seconds(), self._floor, address, self._store.display)
        try:
            line = Line(cursor, name, moment)
            result = work(line)
            line.settle()
        except Unreadable as error:
            raise self._damaged(name, error) from error
        if not line.crowd:
            self._crowded.discard(name)
        elif name not in self._crowded:
            if len(self._crowded) >= KEPT_CROWDED:
                self._crowded.clear()
            self._crowded.add(name)
        return result, line.wakes

    def _damaged(self, key: str, error: Unreadable) -> Incompatible:
        return damaged(key.removeprefix(self._space), self._store.display, error)

    async def _wake(self, name: str, wakes: list[Wake]) -> bool:
        for tries in range(MOST_TRIES):
            dead = await self._wakes.deliver(wakes)
            if not dead:
                return tries > 0
            # The others of a client that died, and those behind it, may be dead as well.
            dead |= self._wakes.dead_among(await self._wire.run(_addresses, name))
            skip = partial(_skip, addresses=dead)
            _, wakes = await self._wire.transact(NEVER, self._work, name, skip, "")
        return True

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        await self._wakes.wait(claim.owner, until)

    def nudge(self, claim: Claim) -> None:
        for wakes in self._own_wakes:
            wakes.wake(claim.owner)

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        def swap(line: Line) -> tuple[bool, Grant | Busy]:
            return line.release(grant.claim.owner), self._admit(line, claim, join=True)

        name, address = self._space + claim.name, self._wakes.address()
        (ours, answer), _ = await self._change(name, swap, address)
        if isinstance(answer, Grant):
            await self._granted(answer)
        await self._do_chores()
        return ours, answer

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        renewal, wakes = await self._wire.transact(until, self._renew, grants, waits, shorten)
        for name, woken in wakes.items():
            await self._wake(name, woken)
        await self._do_chores()
        return renewal

    def _renew(
        self,
        cursor: sqlite3.Cursor,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        shorten: bool,
    ) -> tuple[Renewal, dict[str, list[Wake]]]:
        lost: dict[str, str] = {}
        now = now_seconds()
        for grant in grants:
            claim = grant.claim
            if grant.ref != self._wire.file:
                lost[claim.owner] = self._replaced
                continue
            statement = _RENEW_ALONE if claim.mode is EXCLUSIVE else _RENEW_SHARED
            name = self._space + claim.name
            row = (now + claim.ttl, name, claim.owner, now, shorten)
            if not cursor.execute(statement, row).rowcount:
                lost[claim.owner] = _GONE
        forgotten: set[str] = set()
        wakes: dict[str, list[Wake]] = {}
        for claim, behind in waits:
            name = self._space + claim.name
            refresh = partial(_refresh, owner=claim.owner, behind=behind)
            try:
                stands, woken = self._work(cursor, name, refresh, "")
            except Incompatible:  # its next attempt says so; the others are renewed
                stands, woken = False, []
            if not stands:
                forgotten.add(claim.owner)
            if woken:
                wakes[name] = woken
        return Renewal(lost, forgotten=frozenset(forgotten)), wakes

    async def release(self, grant: Grant) -> bool:
        claim = grant.claim
        name = self._space + claim.name
        freed = False
        if claim.mode is EXCLUSIVE and name not in self._crowded:
            try:
                row = (name, claim.owner, now_seconds())
                look = wall_seconds() * 1_000_000 > grant.token + SHORT_MICROSECONDS
                freed = self._wire.change(_FREE, row, look=look) is not None
            except sqlite3.Error:  # locked, most likely: the long way waits for it
                freed = False
        if not freed:
            freed, _ = await self._change(name, lambda line: line.release(claim.owner))
        if self._wire.ran >= self._chores_at:
            await self._do_chores()
        return freed

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        name, by = self._space + claim.name, NEVER if until is None else until
        await self._change(name, lambda line: line.abandon(claim.owner), until=by)
        self._quiet(claim)

    async def revoke(self, name: str) -> list[int]:
        tokens, _ = await self._change(self._space + name, lambda line: line.clear())
        return tokens

    async def look(self, name: str) -> LockInfo:
        from holdfast.stores.sqlite import inspect as view

        key = self._space + name
        try:
            return await self._wire.run(view.standing, key, name, now_seconds())
        except Unreadable as error:
            raise self._damaged(key, error) from error

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        from holdfast.stores.sqlite import inspect as view

        now = now_seconds()
        return await self._wire.run(view.survey, self._space, prefix, cursor or "", limit, now)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        return await self._wire.run(self._record, grant, value, keep_seconds)

    def _record(
        self, cursor: sqlite3.Cursor, grant: Grant, value: str, keep_seconds: float
    ) -> bool:
        name, wall = self._space + grant.claim.name, wall_seconds()
        with synced(cursor):
            cursor.execute("BEGIN IMMEDIATE")
            held = cursor.execute(_HOLDS, (name, grant.claim.owner, now_seconds())).fetchone()
            if held:
                until = wall + keep_seconds
                row = (name, value, grant.token, wall, until)
                cursor.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?)", row)
            cursor.execute("COMMIT")
        return held is not None

    async def recall(self, name: str) -> Record | None:
        from holdfast.stores.sqlite import inspect as view

        key = self._space + name
        try:
            return await self._wire.run(view.recall, key, wall_seconds())
        except Unreadable as error:
            raise self._damaged(key, error) from error

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        left = until - self._runtime.now()
        await self._runtime.sleep(max(0.0, min(left, self._runtime.between(0.5, 1.0))))

    async def probe(self) -> list[Finding]:
        from holdfast.stores.sqlite import inspect as view

        return await self._wire.run(view.probe, self._store.place)

    async def _do_chores(self) -> None:
        """Now and then, what the file needs; never on the event loop's own thread."""
        if self._wire.ran < self._chores_at:
            return
        self._chores_at = self._wire.ran + chores.EVERY
        if self._runtime.blocking:
            self.tidy_up()
        else:
            import asyncio

            await asyncio.to_thread(self._store.tidy_up)

    def tidy_up(self) -> None:
        """Does the chores, or puts them off if anybody is in the way."""
        path = self._store.place.path
        try:
            self._wire.once(chores.purge, now_seconds(), wall_seconds())
            if chores.log_is_due(path):
                self._wire.once(chores.checkpoint, path)
        except (sqlite3.Error, HoldfastError) as error:
            log.debug("%s: chores put off: %s", self._store.display, error)

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Holds whose file is no longer the one that others open."""
        file = self._wire.file_at_path()
        return {grant.claim.owner: self._replaced for grant in grants if grant.ref != file}

    def forget(self) -> None:
        self._wire.forget()
        for wakes in self._own_wakes:
            wakes.forget()
        self._crowded.clear()

    async def close(self) -> None:
        for wakes in self._own_wakes:
            wakes.close()
        self._wire.close()


def _look_in(cursor: sqlite3.Cursor) -> None:
    cursor.execute("SELECT 1 FROM meta").fetchall()


def _skip(line: Line, addresses: set[str]) -> None:
    line.skip(addresses)


def _refresh(line: Line, owner: str, behind: int) -> bool:
    return line.refresh(owner, behind)


def _addresses(cursor: sqlite3.Cursor, name: str) -> list[str]:
    rows = cursor.execute(_ADDRESSES, (name,)).fetchall()
    return [address for (address,) in rows if isinstance(address, str)]


class SqliteStore:
    """One file."""

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

    def __init__(self, place: Place, settings: Settings, *, adopt: bool = False) -> None:
        self.place, self.adopt = place, adopt
        self.namespace, self.request_seconds = settings.namespace, settings.request_seconds
        self.display = f"sqlite://{place.path}"

    def backend(self, runtime: Runtime) -> SqliteBackend:
        return SqliteBackend(self, runtime)

    def tidy_up(self) -> None:
        """The chores, over a connection of their own, from any thread."""
        backend = self.backend(BlockingRuntime())
        backend.tidy_up()
        run_now(backend.close())


def open_store(url: Url, settings: Settings) -> SqliteStore:
    """``local``, ``sqlite:///path`` or ``sqlite:///path?group=NAME``."""
    url.refuse_unknown("group", "adopt")
    return SqliteStore(place_of(url), settings, adopt=url.flag("adopt"))

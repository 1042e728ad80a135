"""The advisory backend of MySQL: a hold is a session that has the name's lock (``GET_LOCK``).

A claim that does not fit sends one request that waits for the lock on the server and then takes a
token; the reply is read when it arrives. So the queue is the server's own. The session's
``wait_timeout`` is the ttl, in whole seconds. The rules are in ``_sql.advisory``.

Slots are one named lock each. A claim first gets the queue lock of the name (``:t``), then looks
which slots are free, takes them and counts. So claims of several slots never hold a part of them,
and no claim overtakes the first waiter, which keeps the queue lock while it waits for slots.

Deadlocks are not possible: a session that waits for a name holds no lock, and the holder of a
queue lock waits for holders of slots, which wait for nothing.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.admit import check_limit
from holdfast.core.contract import (
    Finding,
    Guarantee,
    Page,
    Renewal,
    Runtime,
    Settings,
    Waiting,
)
from holdfast.errors import BackendUnavailable, LimitMismatch, Unsupported
from holdfast.io.clock import now
from holdfast.io.connection import World
from holdfast.stores._sql.advisory import RECHECK_SECONDS, AdvisoryBackend
from holdfast.stores._sql.connection import Dropped, Opening
from holdfast.stores._sql.purge import PURGE_EVERY
from holdfast.stores.mysql.connect import Ask, MySqlDialler, MySqlStore
from holdfast.stores.mysql.connection import (
    MySqlConnection,
    MySqlPool,
    MySqlSession,
    MySqlSessions,
    checked,
    mark_of,
)
from holdfast.stores.mysql.inspect import findings
from holdfast.stores.mysql.protocol import MySqlReply, Result, Row
from holdfast.stores.mysql.row import read_record
from holdfast.stores.mysql_advisory.inspect import holders_of, waiter_of
from holdfast.stores.mysql_advisory.sql import (
    MySqlAdvisoryStatements,
    got_lock,
    hold_mark,
    session_lock,
)
from holdfast.url import Url

__all__ = ["MySqlAdvisoryBackend", "MySqlAdvisoryStore"]

REBINDS = 5
"""Most retries while other clients change the capacity of a name."""
REMEMBERED = 1024
"""Most names kept in the hint of contended names."""
ENDING_SECONDS = 2.0
"""Longest wait of ``revoke`` until the server has ended a session."""
END_POLL_SECONDS = 0.005
"""Polling interval of ``revoke``."""
MOST_SLOTS = 1024


class MySqlAdvisoryStore(MySqlStore):
    """The store of named locks: a hold ends with its session, or when that is idle for its ttl."""

    mode = "advisory"
    guarantees = frozenset(Guarantee) - {
        Guarantee.FIFO,
        Guarantee.SHARED,
        Guarantee.SURVIVES_SERVER_LOSS,
        Guarantee.WATCH,
    }
    longest_ttl = 365 * 86400.0  # the largest wait_timeout

    def __init__(self, url: Url, settings: Settings) -> None:
        super().__init__(url, settings)
        self._statements = MySqlAdvisoryStatements(self._dialler.schema, settings.namespace)
        self._sessions = MySqlSessions(settings.connections)

    def backend(self, runtime: Runtime) -> MySqlAdvisoryBackend:
        self._sessions.users += 1
        return MySqlAdvisoryBackend(
            runtime,
            self._pool(runtime),
            self._dialler,
            self._sessions,
            self._statements,
        )


class MySqlAdvisoryBackend(AdvisoryBackend[MySqlConnection]):
    """Admits claims by the server's named locks."""

    pool: MySqlPool

    def __init__(
        self,
        runtime: Runtime,
        pool: MySqlPool,
        dialler: MySqlDialler,
        sessions: MySqlSessions,
        statements: MySqlAdvisoryStatements,
    ) -> None:
        dial = partial(_open_session, dialler)
        super().__init__(runtime, pool, sessions, dial, dialler.settings.request_seconds)
        self.display, self._dialler, self.statements = dialler.address.display, dialler, statements
        self._contended: dict[str, None] = {}
        """Names that another session held at the last attempt: a hint to wait in the same
        request."""

    async def _had_ended(self, owner: str, error: BackendUnavailable, until: float) -> bool:
        if not isinstance(error, Dropped):
            return False
        await self._end_unknown(owner, until)
        return True

    async def _take(
        self, session: MySqlSession, claim: Claim, *, join: bool, queued: bool = False
    ) -> Grant | Busy:
        """Takes the name; with ``queued``, the session has waited and has the lock, and only the
        token is taken."""
        try:
            await self._set_ttl(session, claim.ttl)
            if claim.mode is Mode.SLOTS:
                answer = await self._take_slots(session, claim, join=join, queued=queued)
            else:
                answer = await self._take_lock(session, claim, join, queued)
        except LimitMismatch:
            self.sessions.let_go(claim.owner, session, clean=not queued)
            raise
        except BaseException:
            self.sessions.lose(claim.owner, session)
            raise
        if isinstance(answer, Grant):
            session.grant, session.at_head = answer, False
        return answer

    async def _set_ttl(self, session: MySqlSession, ttl: float) -> None:
        seconds = max(1, math.ceil(ttl))
        if session.connection.ttl != seconds:
            await self._execute(session, b"SET SESSION wait_timeout = %d" % seconds)
            session.connection.ttl = seconds

    async def _take_lock(
        self, session: MySqlSession, claim: Claim, join: bool, queued: bool
    ) -> Grant | Busy:
        has_lock = queued
        if not queued and claim.name in self._contended:  # it is probably not free
            results = await self._try_lock(session, claim, join)
            if not got_lock(results):
                return Busy(0)
            if results[0].rows == [(b"1",)]:
                self._contended.pop(claim.name, None)
            if results[2:] and results[2].affected:
                return Grant(claim, results[2].insert_id)
            has_lock = True
        for _ in range(REBINDS):
            sql = self.statements.take(claim, mark_of(session), has_lock=has_lock)
            (counted,) = await self._execute(session, sql)
            if counted.affected:
                return Grant(claim, counted.insert_id)
            self._mark_contended(claim.name)
            ((mine, counts),) = (
                await self._execute(session, self.statements.lock_and_capacity(claim.name))
            )[0].rows
            has_lock, was = mine == b"1", int(counts or 0)
            if not was and not has_lock:
                wait = join and not queued
                return await self._take_lock(session, claim, True, False) if wait else Busy(0)
            rebind = self.statements.rebind(claim, was)
            if was and not (await self._execute(session, rebind))[0].affected:
                if has_lock:
                    await self._execute(
                        session, self.statements.release_lock(claim, mark_of(session))
                    )
                check_limit(claim, was, slots=True, store=self.display)
        session.connection.close()  # the session may have the lock, so it can't wait for it
        raise session.connection.broken(f"{claim.name!r} is changed too often by other clients")

    async def _try_lock(self, session: MySqlSession, claim: Claim, join: bool) -> list[Result]:
        """Tries to get a lock; with ``join``, the same request goes on to wait for it. Returns no
        results if it waits."""
        if not join:
            return await self._execute(session, self.statements.try_lock(claim))
        session.queued_at, wall = now(), self.runtime.wall()
        sql = self.statements.enter_queue(claim, mark_of(session), wall)
        by = min(session.until, session.queued_at + self._seconds)
        reply = await self.driver.begin(session, sql, by, session.connection.waits)
        return [] if reply is None else session.connection.checked(reply)

    def _mark_contended(self, name: str) -> None:
        self._contended[name] = None
        if len(self._contended) > REMEMBERED:
            self._contended.pop(next(iter(self._contended)), None)

    async def _take_slots(
        self, session: MySqlSession, claim: Claim, *, join: bool, queued: bool
    ) -> Grant | Busy:
        """Takes the slots. If they are not free, keeps the queue lock if the claim may wait;
        otherwise keeps nothing."""
        if claim.limit > MOST_SLOTS:
            raise Unsupported(f"{self.display} has at most {MOST_SLOTS} slots in advisory mode")
        queue_lock = self.statements.lock(claim.name, ":t")
        is_first, was, free = await self._look_at_slots(session, claim, queue_lock, queued)
        if was is not None and was != claim.limit:
            await self._rebind(session, claim, was, queue_lock if is_first else b"")
        if not is_first:
            return Busy(0)
        if claim.weight > len(free):
            session.at_head = join or queued
            if not session.at_head:
                await self._execute(session, b"DO RELEASE_LOCK(%s)" % queue_lock)
            return Busy(0, RECHECK_SECONDS)
        return await self._count_slots(session, claim, tuple(free[: claim.weight]), queue_lock)

    async def _look_at_slots(
        self, session: MySqlSession, claim: Claim, queue_lock: bytes, queued: bool
    ) -> tuple[bool, int | None, list[int]]:
        """Returns whether this session has the queue lock, the stored capacity, and the free
        slots."""
        slots = self.statements.slots(claim.name, range(claim.limit))
        # A wait for slots that was killed may have ended before it released its own lock.
        wait_lock = self.statements.lock(claim.name, ":n")
        first = (
            b"SELECT 1, RELEASE_LOCK(%s)" % wait_lock
            if queued
            else b"SELECT GET_LOCK(%s, 0)" % queue_lock
        )
        look = b"SELECT " + b", ".join(b"IS_FREE_LOCK(%s)" % lock for lock in slots)
        capacity = self.statements.capacity(claim.name)
        got, counts, flags = await self._series(session, [first, capacity, look])
        was = int(counts.rows[0][0] or 0) if counts.rows else None
        free = [slot for slot, flag in enumerate(flags.rows[0]) if flag == b"1"]
        return got.rows[0][0] == b"1", was, free

    async def _rebind(
        self, session: MySqlSession, claim: Claim, was: int, queue_lock: bytes
    ) -> None:
        """Changes the capacity of a name that is not in use to the claim's; raises
        ``LimitMismatch`` if it is in use."""
        if queue_lock:
            (changed,) = await self._execute(session, self.statements.rebind(claim, was))
            if changed.affected:
                return
            await self._execute(session, b"DO RELEASE_LOCK(%s)" % queue_lock)
        check_limit(claim, was, slots=was > 0, store=self.display)

    async def _count_slots(
        self, session: MySqlSession, claim: Claim, slots: tuple[int, ...], queue_lock: bytes
    ) -> Grant | Busy:
        locks = [*self.statements.slots(claim.name, slots), hold_mark(mark_of(session))]
        taking = b"SELECT " + b", ".join(b"GET_LOCK(%s, 0)" % lock for lock in locks)
        counting = self.statements.count_slots(claim, slots, mark_of(session))
        free_queue = b"DO RELEASE_LOCK(%s)" % queue_lock
        series = [taking, b"BEGIN", *counting, b"COMMIT", free_queue]
        taken, _, counted, *_ = await self._series(session, series)
        if counted.affected and all(value == b"1" for value in taken.rows[0]):
            return Grant(claim, counted.insert_id, slots)
        # Another client has changed the capacity since we looked.
        session.connection.close()
        raise session.connection.broken(f"{claim.name!r} was changed by another client")

    async def _series(self, session: MySqlSession, statements: Sequence[bytes]) -> list[Result]:
        """Executes statements in one request. Closes the session and raises if a kill between two
        of them has ended the request."""
        results = await self._execute(session, b"; ".join(statements))
        if len(results) < len(statements):
            session.connection.close()
            raise session.connection.broken("the request was interrupted")
        return results

    async def _execute(self, session: MySqlSession, sql: bytes) -> list[Result]:
        """Sends one request on a session. Returns its results; raises for an error."""
        return session.connection.checked(await self._request(session, sql))

    async def _query(self, sql: bytes, until: float | None = None) -> list[Result]:
        return checked(await self.pool.request(sql, until=until), self.display)

    def _enqueue(self, session: MySqlSession, claim: Claim) -> None:
        session.queued_at, wall = now(), self.runtime.wall()
        self._send(session, claim, self.statements.enter_queue(claim, mark_of(session), wall))

    async def _resume(self, session: MySqlSession, claim: Claim) -> Grant | Busy | None:
        if session.at_head:
            await self._end_slot_wait(session, claim)
        else:
            try:
                results = await self._queue_reply(session, claim)
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
                return None
            if results is None:
                return Busy(0)
            if results[2:] and results[2].affected:
                grant = Grant(claim, results[2].insert_id)
                return await self._admitted(session, claim, grant)
        answer = await self._take(session, claim, join=True, queued=True)
        return Busy(0, RECHECK_SECONDS) if isinstance(answer, Busy) else answer

    async def _end_slot_wait(self, session: MySqlSession, claim: Claim) -> None:
        """Kills the session's wait for slots, so that it can send another request."""
        if session.pending and not session.connection.has_input():
            await self.pool.request(
                self.statements.wake_slot_waiter(claim.name), until=session.until
            )

    async def _queue_reply(self, session: MySqlSession, claim: Claim) -> list[Result] | None:
        """Returns the results of the waiting request if it got the lock, otherwise None. Raises if
        the session broke."""
        # The lock's result arrives before the token's: a reply that has begun is read to its end.
        reply = await self.driver.collect_pending(
            session, min(session.until, now() + self._seconds)
        )
        if reply is None:
            return None
        if got_lock(reply.results):
            results: list[Result] = reply.results
            return results
        self._enqueue(session, claim)  # the wait timed out on the server, or was killed
        return None

    async def _end_session(self, connection: MySqlConnection, until: float) -> None:
        kill = b"KILL CONNECTION IS_USED_LOCK(%s)" % session_lock(connection.tag)
        await self.pool.request(kill, until=until)

    async def _wait(self, session: MySqlSession, claim: Claim, busy: Busy, until: float) -> None:
        if session.at_head and not session.pending:
            self._send(session, claim, self.statements.await_slot(claim))
        if session.pending:
            await self.driver.wait_for_reply(session, until)

    def _touch(self, session: MySqlSession, claim: Claim) -> bytes:
        if session.grant is not None and session.grant.claim.ttl == claim.ttl:
            return b"DO 0"
        wait = b"SET SESSION wait_timeout = %d" % max(1, math.ceil(claim.ttl))
        return wait + b"; " + self.statements.set_ttl(claim)

    def _kept(self, session: MySqlSession, grant: Grant) -> None:
        super()._kept(session, grant)
        session.connection.ttl = max(1, math.ceil(grant.claim.ttl))

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        lost, unknown = await self._renew_sessions(grants, until, shorten)
        waiting = {w.claim.owner: self.sessions.by_owner.get(w.claim.owner) for w in waits}
        gone = [owner for owner, s in waiting.items() if s is None or not s.connection.open]
        await self._purge(until)
        return Renewal(lost, unknown, frozenset(gone))

    async def _release(self, session: MySqlSession, grant: Grant) -> bool:
        """Also wakes the first waiter for slots. Returns whether the session had all locks."""
        held = [*self.statements.locks(grant), hold_mark(mark_of(session))]
        sql = b"SELECT RELEASE_LOCK(%s)" % b"), RELEASE_LOCK(".join(held)
        if grant.claim.mode is Mode.SLOTS:
            sql += b"; " + self.statements.wake_slot_waiter(grant.claim.name)
        reply: MySqlReply = await self._request(session, sql)
        if not reply.results:
            session.connection.checked(reply)
        (freed,) = reply.results[0].rows
        return freed.count(b"1") == len(freed)

    async def _leave(self, session: MySqlSession, claim: Claim) -> None:
        own = session_lock(session.connection.tag)
        if session.pending:  # the server may never reply to a request killed between statements
            session.until = min(session.until, now() + RECHECK_SECONDS)
            await self.pool.request(b"KILL QUERY IS_USED_LOCK(%s)" % own, until=session.until)
        sql = b"SELECT RELEASE_ALL_LOCKS() >= 0, GET_LOCK(%s, 0)" % own
        (left,) = await self._execute(session, sql)
        if left.rows[0] != (b"1", b"1"):
            raise session.connection.broken("its locks are not as expected")
        if claim.mode is Mode.SLOTS:
            wake = self.statements.wake_slot_waiter(claim.name)
            await self.pool.request(wake, until=session.until)
        self.sessions.give_back(session)  # last: if the wake-up fails, nobody else has it

    async def revoke(self, name: str) -> list[int]:
        (held,) = await self._query(self.statements.look([name]))
        tokens = list(dict.fromkeys(int(row[3] or 0) for row in held.rows))
        # By the lock that marks this hold: its slots may belong to another hold at the kill.
        for mark in dict.fromkeys(int(row[7] or 0) for row in held.rows):
            await self.pool.request(b"KILL CONNECTION IS_USED_LOCK(%s)" % hold_mark(mark))
        deadline = now() + ENDING_SECONDS
        while tokens and now() < deadline:
            (left,) = await self._query(self.statements.look([name]))
            if not {int(row[3] or 0) for row in left.rows} & set(tokens):
                break
            await self.runtime.sleep(END_POLL_SECONDS)
        if any(int(row[1] or 0) >= 0 for row in held.rows):
            await self.pool.request(self.statements.wake_slot_waiter(name))
        return tokens

    async def look(self, name: str) -> LockInfo:
        sql = self.statements.look([name]) + b"; " + self.statements.waiting(name)
        held, waiting = await self._query(sql)
        waiters = [waiter_of((row[0] or b"").decode(errors="replace")) for row in waiting.rows]
        holders, limit = holders_of(held.rows)
        return LockInfo(name, limit, holders, tuple(w for w in waiters if w is not None))

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        (page,) = await self._query(self.statements.page(prefix, cursor or "", limit))
        names = [(row[0] or b"").decode(errors="surrogateescape") for row in page.rows]
        if not names:
            return Page([], None)
        (held,) = await self._query(self.statements.look(names))
        by_name: dict[str, list[Row]] = {}
        for row in held.rows:
            by_name.setdefault((row[0] or b"").decode(errors="backslashreplace"), []).append(row)
        infos = [
            LockInfo(name, found[1], found[0], ())
            for name, rows in by_name.items()
            for found in [holders_of(rows)]
        ]
        return Page(infos, names[-1] if len(names) == limit else None)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        claim = grant.claim
        session = self.sessions.by_owner.get(claim.owner)
        if session is None or session.grant is None:
            return False
        locks = self.statements.locks(session.grant)
        sql = self.statements.record(claim, locks, grant.token, value, keep_seconds)
        try:
            (written,) = await self._execute(session, sql)
        except BackendUnavailable:
            if not session.connection.open:
                self.sessions.lose(claim.owner, session)
            raise
        return written.affected > 0

    async def recall(self, name: str) -> Record | None:
        (kept,) = await self._query(self.statements.recall(name))
        for row in kept.rows:
            return read_record(row, name, self.display)
        return None

    async def _purge(self, until: float | None = None) -> None:
        """Deletes a bounded number of idle rows, every ``PURGE_EVERY`` attempts. A failed step is
        repeated later."""
        if self._until_purge > 0:
            return
        self._until_purge = PURGE_EVERY
        with suppress(BackendUnavailable):
            await self._query(self.statements.purge(), until=until)
            await self.pool.request(self.statements.purge_transactions(), until=until)

    async def probe(self) -> list[Finding]:
        ttl = "the server ends a session that is idle for its ttl in whole seconds (wait_timeout)"
        queue = "waiters are in the server's own queue, each with a connection"

        async def judge(ask: Ask) -> list[Finding]:
            async def execute(sql: bytes) -> list[Result]:
                return checked(await ask(sql), self.display)

            found = await findings(execute)
            return [*found, Finding("waiting", queue), Finding("ttl", ttl)]

        return await self._dialler.examine(self.runtime, judge)


async def _open_session(dialler: MySqlDialler, world: World, until: float) -> MySqlConnection:
    """Opens a connection that holds a named lock, by which other sessions find and kill it."""
    connection = await dialler.connect_to_namespace(world, until)
    try:
        tag = secrets.token_hex(12)
        sql = b"SELECT GET_LOCK(%s, 0), CONNECTION_ID()" % session_lock(tag)
        reply = await Opening(world, connection, until).ask(sql)
        ((got, number),) = connection.checked(reply)[0].rows
        if got != b"1":
            raise Unsupported(f"{dialler.address.display} has no named locks (GET_LOCK)")
        connection.tag, connection.number = tag, int(number or 0)
    except BaseException:
        connection.close()
        raise
    return connection

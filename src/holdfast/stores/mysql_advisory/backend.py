"""The advisory backend of MySQL: a hold is a session that has the name's lock (``GET_LOCK``).

A claim that does not fit sends one request that waits for the lock on the server and then takes a
token; the reply is read when it arrives. So the queue is the server's own. The session's
``wait_timeout`` is the ttl, in whole seconds, and every renewal restarts it. After a wait it runs
since the grant, which may be as old as the request: a grant that may be old is renewed before it
is returned.

Slots are one named lock each. A claim first gets the queue lock of the name (``:t``), then looks
which slots are free, takes them and counts. So claims of several slots never hold a part of them,
and no claim overtakes the first waiter, which keeps the queue lock while it waits for slots.

Deadlocks are not possible: a session that waits for a name holds no lock, and the holder of a
queue lock waits for holders of slots, which wait for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import inf

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.admit import check_limit
from holdfast.core.backoff import WATCH_POLL_SECONDS
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
from holdfast.stores._sql import advisory as sql_advisory
from holdfast.stores._sql.connection import Dropped, run_apart
from holdfast.stores._sql.purge import PURGE_EVERY, attempts_until_purge
from holdfast.stores._sql.session import ended
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
from holdfast.stores.mysql_advisory.session import (
    AsyncMySqlSessionDriver,
    BlockingMySqlSessionDriver,
    MySqlSessionDriver,
    open_session,
)
from holdfast.stores.mysql_advisory.sql import (
    MySqlAdvisoryStatements,
    got_lock,
    hold_mark,
    session_lock,
)
from holdfast.url import Url

__all__ = ["MySqlAdvisoryBackend", "MySqlAdvisoryStore"]

RECHECK_SECONDS = 1.0
"""Polling interval of the first waiter for slots: a killed holder wakes no waiter."""
FRESH_SHARE = 0.1
"""Largest part of the ttl that may be over when a grant is returned without a renewal."""
REBINDS = 5
"""Most retries while other clients change the capacity of a name."""
REMEMBERED = 1024
"""Most names kept in the hint of contended names."""
ENDING_SECONDS = 2.0
"""Longest wait of ``revoke`` until the server has ended a session."""
END_POLL_SECONDS = 0.005
"""Polling interval of ``revoke``, and of ``abandon`` while an attempt is under way."""
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


class MySqlAdvisoryBackend:
    """Admits claims by the server's named locks."""

    def __init__(
        self,
        runtime: Runtime,
        pool: MySqlPool,
        dialler: MySqlDialler,
        sessions: MySqlSessions,
        statements: MySqlAdvisoryStatements,
    ) -> None:
        self.runtime, self.pool, self.statements = runtime, pool, statements
        self.display, self._dialler = dialler.address.display, dialler
        self._until_purge = attempts_until_purge()
        self.sessions = sessions
        self.driver: MySqlSessionDriver = (
            BlockingMySqlSessionDriver() if runtime.blocking else AsyncMySqlSessionDriver()
        )
        self._dial = partial(open_session, dialler)
        self._seconds = dialler.settings.request_seconds
        self._renewals = MySqlSessionRenewals(sessions, self.driver, statements)
        self._contended: dict[str, None] = {}
        """Names that another session held at the last attempt: a hint to wait in the same
        request."""
        self._nudged: set[str] = set()
        """Owners that were nudged before they had a session."""
        self._closed = False

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        # Two attempts of one claim at the same time would use one session: only one of them runs.
        attempting, mark = self.sessions.attempting, object()
        if attempting.setdefault(claim.owner, mark) is not mark:
            return Busy(0, RECHECK_SECONDS)
        try:
            return await self._attempt(claim, join, inf if until is None else until)
        finally:
            del attempting[claim.owner]
            session = self.sessions.by_owner.get(claim.owner)
            if session is not None:
                session.until = inf
                if session.grant is not None:
                    self._nudged.discard(claim.owner)  # no wait follows

    async def _attempt(self, claim: Claim, join: bool, until: float) -> Grant | Busy:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.until = until
            answer = await self._resume(session, claim)
            if answer is not None:
                return answer
        if claim.owner in self.sessions.unknown:
            await self._end_unknown(claim.owner, until)
        self._until_purge -= 1
        session = self.sessions.borrow()
        if session is not None:
            session.until = until
            try:
                return await self._begin(session, claim, join)
            except Dropped:  # the session had ended while it was idle
                await self._end_unknown(claim.owner, until)
        session = await self.driver.open(self._dial, min(until, now() + self._seconds))
        session.until = until
        return await self._begin(session, claim, join)

    async def _begin(self, session: MySqlSession, claim: Claim, join: bool) -> Grant | Busy:
        """Sends the first request for a claim, on a session without locks."""
        self.sessions.by_owner[claim.owner] = session
        answer = await self._take(session, claim, join=join, queued=False)
        if isinstance(answer, Busy):
            if not join:
                del self.sessions.by_owner[claim.owner]
                self.sessions.give_back(session)
            elif not session.at_head and not session.pending:
                self._enter_queue(session, claim)
        return answer

    async def _take(
        self, session: MySqlSession, claim: Claim, *, join: bool, queued: bool
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
        reply = await self.driver.begin(session, sql, by)
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
        return session.connection.checked(await self._reply_to(session, sql))

    async def _reply_to(self, session: MySqlSession, sql: bytes) -> MySqlReply:
        by = min(session.until, now() + self._seconds)
        return await self.driver.request(session, sql, by)

    async def _query(self, sql: bytes, until: float | None = None) -> list[Result]:
        return checked(await self.pool.request(sql, until=until), self.display)

    def _enter_queue(self, session: MySqlSession, claim: Claim) -> None:
        """Sends the request that waits for the lock. A later ``attempt`` reads its reply."""
        session.queued_at, wall = now(), self.runtime.wall()
        self._send(session, claim, self.statements.enter_queue(claim, mark_of(session), wall))

    def _send(self, session: MySqlSession, claim: Claim, sql: bytes) -> None:
        try:
            session.connection.send(sql)
        except BackendUnavailable:
            self.sessions.lose(claim.owner, session)
            raise
        session.pending = True

    async def _resume(self, session: MySqlSession, claim: Claim) -> Grant | Busy | None:
        """Continues a claim that has a session. Returns None if the session broke."""
        if session.grant is not None:
            renewal = await self.renew([session.grant], [], until=session.until)
            if renewal.unknown:
                raise BackendUnavailable(renewal.unknown[claim.owner])
            return None if renewal.lost else session.grant
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
                return await self._granted_in_queue(session, claim, results[2].insert_id)
        answer = await self._take(session, claim, join=True, queued=True)
        return Busy(0, RECHECK_SECONDS) if isinstance(answer, Busy) else answer

    async def _granted_in_queue(
        self, session: MySqlSession, claim: Claim, token: int
    ) -> Grant | Busy | None:
        """Returns the grant of a claim that got the lock and its token in the queue."""
        session.grant = Grant(claim, token)
        old = now() - session.queued_at > FRESH_SHARE * claim.ttl
        if old or ended([session]):  # it may have been broken before its answer was read
            return await self._resume(session, claim)
        return Grant(claim, token, since=session.queued_at)

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
            return reply.results
        self._enter_queue(session, claim)  # the wait timed out on the server, or was killed
        return None

    async def _end_unknown(self, owner: str, until: float = inf) -> None:
        async def end(connection: MySqlConnection) -> None:
            kill = b"KILL CONNECTION IS_USED_LOCK(%s)" % session_lock(connection.tag)
            await self.pool.request(kill, until=until)

        await self.sessions.end_unknown(owner, end)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        if claim.owner in self._nudged:
            self._nudged.discard(claim.owner)
            return
        session = self.sessions.by_owner.get(claim.owner)
        if session is None or session.grant is not None:
            return
        if session.at_head and not session.pending:
            self._send(session, claim, self.statements.await_slot(claim))
        if session.pending:
            await self.driver.wait_for_reply(session, until)

    def nudge(self, claim: Claim) -> None:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.nudge()
        elif claim.owner in self.sessions.attempting:
            self._nudged.add(claim.owner)

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        until = min(until, now() + self._seconds)
        lost, unknown = await self._renewals.renew(grants, until, shorten)
        waiting = {w.claim.owner: self.sessions.by_owner.get(w.claim.owner) for w in waits}
        gone = [owner for owner, s in waiting.items() if s is None or not s.connection.open]
        await self._purge(until)
        return Renewal(lost, unknown, frozenset(gone))

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Returns the owners whose session has ended, as their sockets show. Sends nothing."""
        return self._renewals.glance(grants)

    async def release(self, grant: Grant) -> bool | None:
        owner = grant.claim.owner
        session = self.sessions.by_owner.get(owner)
        if session is None or session.grant is None:
            return False
        del self.sessions.by_owner[owner]
        gone = bool(ended([session]))
        try:
            ours = await self._release_locks(session, session.grant)
        except Dropped:
            self.sessions.lose(owner, session)
            await self._end_unknown(owner)
            return False if gone else None  # it may have run before the connection was cut
        except BaseException:
            self.sessions.lose(owner, session)
            raise
        if ours:
            self.sessions.give_back(session)
        else:
            session.connection.close()
        await self._purge()
        return ours

    async def _release_locks(self, session: MySqlSession, grant: Grant) -> bool:
        """Releases the locks of a hold, and wakes the first waiter for slots. Returns whether the
        session had all of them."""
        held = [*self.statements.locks(grant), hold_mark(mark_of(session))]
        sql = b"SELECT RELEASE_LOCK(%s)" % b"), RELEASE_LOCK(".join(held)
        if grant.claim.mode is Mode.SLOTS:
            sql += b"; " + self.statements.wake_slot_waiter(grant.claim.name)
        reply = await self._reply_to(session, sql)
        if not reply.results:
            session.connection.checked(reply)
        (freed,) = reply.results[0].rows
        return freed.count(b"1") == len(freed)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        deadline = now() + self._seconds
        if until is not None:
            deadline = min(deadline, until)
        while claim.owner in self.sessions.attempting and now() < deadline:
            await self.runtime.sleep(END_POLL_SECONDS)  # after the attempt that is under way
        self._nudged.discard(claim.owner)
        session = self.sessions.by_owner.pop(claim.owner, None)
        if session is not None:
            try:
                session.until = deadline
                await self._reset(session, claim)
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
            except BaseException:
                self.sessions.lose(claim.owner, session)
                raise
        if claim.owner in self.sessions.unknown:
            await self._end_unknown(claim.owner, deadline)

    async def _reset(self, session: MySqlSession, claim: Claim) -> None:
        """Ends what a session holds or waits for, and returns the session to the idle ones."""
        own = session_lock(session.connection.tag)
        if session.pending:  # the server may never reply to a request killed between statements
            session.until = min(session.until, now() + RECHECK_SECONDS)
            await self.pool.request(b"KILL QUERY IS_USED_LOCK(%s)" % own, until=session.until)
        sql = b"SELECT RELEASE_ALL_LOCKS() >= 0, GET_LOCK(%s, 0)" % own
        (left,) = await self._execute(session, sql)
        if left.rows[0] != (b"1", b"1"):
            raise session.connection.broken("its locks are not as expected")
        self.sessions.give_back(session)
        if claim.mode is Mode.SLOTS:
            await self.pool.request(self.statements.wake_slot_waiter(claim.name))

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

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(*WATCH_POLL_SECONDS))
        await self.runtime.sleep(max(0.0, pause))

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

        def judge(ask: Ask) -> list[Finding]:
            found = findings(lambda sql: checked(ask(sql), self.display))
            return [*found, Finding("waiting", queue), Finding("ttl", ttl)]

        return await run_apart(self.runtime, lambda: self._dialler.examine(judge))

    def forget(self) -> None:
        self._until_purge = attempts_until_purge()
        self.sessions.forget()
        self.driver.forget()
        self.pool.forget()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.sessions.remove_user()
            self.driver.close()
        await self.pool.close()


class MySqlSessionRenewals(sql_advisory.SessionKeepAlive[MySqlConnection, bytes, MySqlReply]):
    """Renews holds by a request on each session, which restarts its ``wait_timeout``."""

    def __init__(
        self,
        sessions: MySqlSessions,
        driver: MySqlSessionDriver,
        statements: MySqlAdvisoryStatements,
    ) -> None:
        super().__init__(sessions, driver)
        self._statements = statements

    def touch(self, session: MySqlSession, claim: Claim) -> bytes:
        if session.grant is not None and session.grant.claim.ttl == claim.ttl:
            return b"DO 0"
        wait = b"SET SESSION wait_timeout = %d" % max(1, math.ceil(claim.ttl))
        return wait + b"; " + self._statements.set_ttl(claim)

    def kept(self, session: MySqlSession, grant: Grant) -> None:
        super().kept(session, grant)
        session.connection.ttl = max(1, math.ceil(grant.claim.ttl))

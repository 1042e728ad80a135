"""MySQL's named locks: a hold is a session that has the name's lock (``GET_LOCK``).

A claim that does not fit sends the server the request that waits for the lock and takes its token,
and reads the answer when it comes: the server's own queue is the line. The session's
``wait_timeout`` is the ttl, in whole seconds, and every renewal starts it anew. It runs since the
grant, which may be as old as the request: a grant that may be old is renewed before it is told.

Nobody waits in a circle: who waits for a name has nothing, and who has the turn of slots waits for
those that have slots, who wait for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import inf

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.admit import check_limit
from holdfast.core.contract import Finding, Renewal, Runtime, Settings, Waiting
from holdfast.errors import BackendUnavailable, LimitMismatch
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Dial, Dropped
from holdfast.stores.mysql.connection import Connection, Session, Sessions, mark_of
from holdfast.stores.mysql.protocol import Reply, Result
from holdfast.stores.mysql_advisory.inspect import AdvisoryView, Wire
from holdfast.stores.mysql_advisory.renew import Keeping
from holdfast.stores.mysql_advisory.session import AsyncTalk, BlockingTalk, Talk
from holdfast.stores.mysql_advisory.slots import Slots
from holdfast.stores.mysql_advisory.sql import AdvisoryStatements, came, hold_mark, session_lock

__all__ = ["AdvisoryBackend"]

RECHECK_SECONDS = 1.0
FRESH_SHARE = 0.1
"""How much of a ttl may be over when a grant is told."""
REBINDS = 5
REMEMBERED = 1024


class AdvisoryBackend(AdvisoryView):
    """Admits claims by the server's own locks."""

    def __init__(
        self,
        runtime: Runtime,
        wire: Wire,
        dial: Dial[Connection],
        sessions: Sessions,
        statements: AdvisoryStatements,
        settings: Settings,
        display: str,
    ) -> None:
        super().__init__(runtime, wire, statements, display)
        self.sessions = sessions
        self.talk: Talk = BlockingTalk() if runtime.blocking else AsyncTalk()
        self._dial, self._seconds = dial, settings.request_seconds
        self._keep = Keeping(sessions, self.talk, statements)
        self._slots = Slots(self.ask, statements, display)
        self._wanted: dict[str, None] = {}
        """Names that somebody else had when they were last asked for."""
        self._nudged: set[str] = set()
        """Owners that were nudged before they had a session to wait on."""
        self._closed = False

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        # A waiter and whoever exchanges with it may ask at the same time: one of them does.
        asking, mark = self.sessions.attempting, object()
        if asking.setdefault(claim.owner, mark) is not mark:
            return Busy(0, RECHECK_SECONDS)
        try:
            return await self._attempt(claim, join, inf if until is None else until)
        finally:
            del asking[claim.owner]
            session = self.sessions.by_owner.get(claim.owner)
            if session is not None:
                session.until = inf
                if session.grant is not None:
                    self._nudged.discard(claim.owner)  # there will be no wait

    async def _attempt(self, claim: Claim, join: bool, until: float) -> Grant | Busy:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.until = until
            answer = await self._go_on(session, claim)
            if answer is not None:
                return answer
        if claim.owner in self.sessions.unknown:
            await self._end_doomed(claim.owner, until)
        self._until_purge -= 1
        session = self.sessions.borrow()
        if session is not None:
            session.until = until
            try:
                return await self._begin(session, claim, join)
            except Dropped:  # it had ended before it was asked
                await self._end_doomed(claim.owner, until)
        session = await self.talk.open(self._dial, min(until, now() + self._seconds))
        session.until = until
        return await self._begin(session, claim, join)

    async def _begin(self, session: Session, claim: Claim, join: bool) -> Grant | Busy:
        """The first request for a claim, on a session that has nothing."""
        self.sessions.by_owner[claim.owner] = session
        answer = await self._take(session, claim, join=join, queued=False)
        if isinstance(answer, Busy):
            if not join:
                del self.sessions.by_owner[claim.owner]
                self.sessions.give_back(session)
            elif not session.at_head and not session.pending:
                self._line_up(session, claim)
        return answer

    async def _take(
        self, session: Session, claim: Claim, *, join: bool, queued: bool
    ) -> Grant | Busy:
        """Asks for the name, or for its token if the session waited for the lock and has it."""
        try:
            await self._set_ttl(session, claim.ttl)
            if claim.mode is Mode.SLOTS:
                answer = await self._slots.take(session, claim, join=join, queued=queued)
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

    async def _set_ttl(self, session: Session, ttl: float) -> None:
        seconds = max(1, math.ceil(ttl))
        if session.connection.ttl != seconds:
            await self.ask(session, b"SET SESSION wait_timeout = %d" % seconds)
            session.connection.ttl = seconds

    async def _take_lock(
        self, session: Session, claim: Claim, join: bool, queued: bool
    ) -> Grant | Busy:
        has_lock = queued
        if not queued and claim.name in self._wanted:  # it hardly is free
            told = await self._try(session, claim, join)
            if not came(told):
                return Busy(0)
            if told[0].rows == [(b"1",)]:
                self._wanted.pop(claim.name, None)
            if told[2:] and told[2].affected:
                return Grant(claim, told[2].insert_id)
            has_lock = True
        for _ in range(REBINDS):
            sql = self.statements.take(claim, mark_of(session), has_lock=has_lock)
            (counted,) = await self.ask(session, sql)
            if counted.affected:
                return Grant(claim, counted.insert_id)
            self._want(claim.name)
            ((mine, counts),) = (await self.ask(session, self.statements.why(claim.name)))[0].rows
            has_lock, was = mine == b"1", int(counts or 0)
            if not was and not has_lock:
                wait = join and not queued
                return await self._take_lock(session, claim, True, False) if wait else Busy(0)
            rebind = self.statements.rebind(claim, was)
            if was and not (await self.ask(session, rebind))[0].affected:
                if has_lock:
                    await self.ask(session, self.statements.let_go(claim, mark_of(session)))
                check_limit(claim, was, slots=True, store=self.display)
        session.connection.close()  # it may have the lock, and can't go and wait for it
        raise session.connection.broken(f"{claim.name!r} keeps changing while it is asked for")

    async def _try(self, session: Session, claim: Claim, join: bool) -> list[Result]:
        """Asks for a lock; and goes on to wait for it where it is not free, if it may."""
        if not join:
            return await self.ask(session, self.statements.try_lock(claim))
        session.queued_at, wall = now(), self.runtime.wall()
        sql = self.statements.line_up(claim, mark_of(session), wall)
        by = min(session.until, session.queued_at + self._seconds)
        reply = await self.talk.begin(session, sql, by)
        return [] if reply is None else session.connection.checked(reply)

    def _want(self, name: str) -> None:
        self._wanted[name] = None
        if len(self._wanted) > REMEMBERED:
            self._wanted.pop(next(iter(self._wanted)), None)

    async def ask(self, session: Session, sql: bytes) -> list[Result]:
        """One request on a session."""
        return session.connection.checked(await self._talk_to(session, sql))

    async def _talk_to(self, session: Session, sql: bytes) -> Reply:
        by = min(session.until, now() + self._seconds)
        return await self.talk.request(session, sql, by)

    def _line_up(self, session: Session, claim: Claim) -> None:
        """Sends the request that waits for the lock; ``attempt`` reads its answer."""
        session.queued_at, wall = now(), self.runtime.wall()
        self._send(session, claim, self.statements.line_up(claim, mark_of(session), wall))

    def _send(self, session: Session, claim: Claim, sql: bytes) -> None:
        try:
            session.connection.send(sql)
        except BackendUnavailable:
            self.sessions.lose(claim.owner, session)
            raise
        session.pending = True

    async def _go_on(self, session: Session, claim: Claim) -> Grant | Busy | None:
        """What has become of a claim that was asked before; nothing if its session broke."""
        if session.grant is not None:
            renewal = await self.renew([session.grant], [], until=session.until)
            if renewal.unknown:
                raise BackendUnavailable(renewal.unknown[claim.owner])
            return None if renewal.lost else session.grant
        if session.at_head:
            await self._wake_up(session, claim)
        else:
            try:
                told = await self._queue_tells(session, claim)
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
                return None
            if told is None:
                return Busy(0)
            if told[2:] and told[2].affected:
                return await self._come(session, claim, told[2].insert_id)
        answer = await self._take(session, claim, join=True, queued=True)
        return Busy(0, RECHECK_SECONDS) if isinstance(answer, Busy) else answer

    async def _come(self, session: Session, claim: Claim, token: int) -> Grant | Busy | None:
        """The turn of one who waited for the lock, and was given its token with it."""
        session.grant = Grant(claim, token)
        if now() - session.queued_at > FRESH_SHARE * claim.ttl:
            return await self._go_on(session, claim)
        return Grant(claim, token, since=session.queued_at)

    async def _wake_up(self, session: Session, claim: Claim) -> None:
        """Ends the nap of one who is asked again."""
        if session.pending and not session.connection.has_input():
            await self.wire.request(self.statements.stir(claim.name), until=session.until)

    async def _queue_tells(self, session: Session, claim: Claim) -> list[Result] | None:
        """What was granted, if it is our turn; raises if the session broke."""
        # The lock's answer comes before its token's: what has begun is read to its end.
        reply = await self.talk.collect_pending(session, min(session.until, now() + self._seconds))
        if reply is None:
            return None
        if came(reply.results):
            return reply.results
        self._line_up(session, claim)  # the server waited long enough, or was told to stop
        return None

    async def _end_doomed(self, owner: str, until: float = inf) -> None:
        async def end(connection: Connection) -> None:
            kill = b"KILL CONNECTION IS_USED_LOCK(%s)" % session_lock(connection.tag)
            await self.wire.request(kill, until=until)

        await self.sessions.end_unknown(owner, end)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        if claim.owner in self._nudged:
            self._nudged.discard(claim.owner)
            return
        session = self.sessions.by_owner.get(claim.owner)
        if session is None or session.grant is not None:
            return
        if session.at_head and not session.pending:
            self._send(session, claim, self.statements.nap(claim))
        if session.pending:
            await self.talk.wait_for_reply(session, until)

    def nudge(self, claim: Claim) -> None:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.nudge()
        elif claim.owner in self.sessions.attempting:
            self._nudged.add(claim.owner)

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        """One that stands in the server's own queue is woken by the release: asked for on its
        behalf, it might be let in anew after it came, and left, by itself."""
        stands = claim.owner in self.sessions.by_owner
        was_ours = await self.release(grant)
        return was_ours, Busy(0) if stands else await self.attempt(claim, join=True)

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        until = min(until, now() + self._seconds)
        lost, unknown = await self._keep.renew(grants, until, shorten)
        standing = {w.claim.owner: self.sessions.by_owner.get(w.claim.owner) for w in waits}
        gone = [owner for owner, s in standing.items() if s is None or not s.connection.open]
        await self._purge(until)
        return Renewal(lost, unknown, frozenset(gone))

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Whose session has ended: its socket says so before anybody asks."""
        return self._keep.glance(grants)

    async def release(self, grant: Grant) -> bool:
        owner = grant.claim.owner
        session = self.sessions.by_owner.get(owner)
        if session is None or session.grant is None:
            return False
        del self.sessions.by_owner[owner]
        try:
            ours = await self._free(session, session.grant)
        except Dropped:
            self.sessions.lose(owner, session)
            await self._end_doomed(owner)
            return False
        except BaseException:
            self.sessions.lose(owner, session)
            raise
        if ours:
            self.sessions.give_back(session)
        else:
            session.connection.close()
        await self._purge()
        return ours

    async def _free(self, session: Session, grant: Grant) -> bool:
        """Frees what is held, and stirs who naps for it."""
        held = [*self.statements.locks(grant), hold_mark(mark_of(session))]
        sql = b"SELECT RELEASE_LOCK(%s)" % b"), RELEASE_LOCK(".join(held)
        if grant.claim.mode is Mode.SLOTS:
            sql += b"; " + self.statements.stir(grant.claim.name)
        reply = await self._talk_to(session, sql)
        if not reply.results:
            session.connection.checked(reply)
        (freed,) = reply.results[0].rows
        return freed.count(b"1") == len(freed)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        patience = now() + self._seconds
        if until is not None:
            patience = min(patience, until)
        while claim.owner in self.sessions.attempting and now() < patience:
            await self.runtime.sleep(0.005)  # behind whoever asks for it just now
        self._nudged.discard(claim.owner)
        session = self.sessions.by_owner.pop(claim.owner, None)
        if session is not None:
            try:
                session.until = patience
                await self._leave(session, claim)
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
            except BaseException:
                self.sessions.lose(claim.owner, session)
                raise
        if claim.owner in self.sessions.unknown:
            await self._end_doomed(claim.owner, patience)

    async def _leave(self, session: Session, claim: Claim) -> None:
        """Ends what a session has or waits for, and keeps the session."""
        own = session_lock(session.connection.tag)
        if session.pending:  # killed between its statements it may never be answered
            session.until = min(session.until, now() + RECHECK_SECONDS)
            await self.wire.request(b"KILL QUERY IS_USED_LOCK(%s)" % own, until=session.until)
        sql = b"SELECT RELEASE_ALL_LOCKS() >= 0, GET_LOCK(%s, 0)" % own
        (left,) = await self.ask(session, sql)
        if left.rows[0] != (b"1", b"1"):
            raise session.connection.broken("its locks are not what they should be")
        self.sessions.give_back(session)
        if claim.mode is Mode.SLOTS:
            await self.wire.request(self.statements.stir(claim.name))

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        claim = grant.claim
        session = self.sessions.by_owner.get(claim.owner)
        if session is None or session.grant is None:
            return False
        locks = self.statements.locks(session.grant)
        sql = self.statements.record(claim, locks, grant.token, value, keep_seconds)
        try:
            (written,) = await self.ask(session, sql)
        except BackendUnavailable:
            if not session.connection.open:
                self.sessions.lose(claim.owner, session)
            raise
        return written.affected > 0

    async def probe(self) -> list[Finding]:
        ttl = "the server ends a session that was idle for its ttl in whole seconds (wait_timeout)"
        queue = "waiters stand in the server's own queue, each with a connection"
        return [*await self.findings(), Finding("waiting", queue), Finding("ttl", ttl)]

    def forget(self) -> None:
        self.sessions.forget()
        self.talk.forget()
        self.wire.forget()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.sessions.remove_user()
            self.talk.close()
        await self.wire.close()

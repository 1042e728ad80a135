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
from functools import partial
from math import inf

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
from holdfast.stores._sql import advisory as sql_advisory_keep
from holdfast.stores._sql.connection import Dial, Dropped
from holdfast.stores.mysql.connect import Store
from holdfast.stores.mysql.connection import (
    Connection,
    Session,
    Sessions,
    Wire,
    checked,
    mark_of,
)
from holdfast.stores.mysql.inspect import findings
from holdfast.stores.mysql.protocol import Reply, Result, Row
from holdfast.stores.mysql.row import read_record
from holdfast.stores.mysql_advisory.inspect import holders_of, waiter_of
from holdfast.stores.mysql_advisory.session import AsyncTalk, BlockingTalk, Talk, open_session
from holdfast.stores.mysql_advisory.sql import AdvisoryStatements, came, hold_mark, session_lock
from holdfast.url import Url

__all__ = ["AdvisoryBackend", "AdvisoryStore"]

RECHECK_SECONDS = 1.0
FRESH_SHARE = 0.1
"""How much of a ttl may be over when a grant is told."""
REBINDS = 5
REMEMBERED = 1024
PURGE_EVERY = 1000
ENDING_SECONDS = 2.0
"""How long ``revoke`` waits for the server to have ended a session."""
MOST_SLOTS = 1024


class AdvisoryStore(Store):
    """Named locks: a hold ends with its connection, or when that is idle for its ttl."""

    mode = "advisory"
    guarantees = frozenset(Guarantee) - {
        Guarantee.FIFO,
        Guarantee.SHARED,
        Guarantee.SURVIVES_SERVER_LOSS,
        Guarantee.WATCH,
    }
    longest_ttl = 365 * 86400.0  # the most that wait_timeout takes

    def __init__(self, url: Url, settings: Settings) -> None:
        super().__init__(url, settings)
        self._statements = AdvisoryStatements(self._dialler.schema, settings.namespace)
        self._sessions = Sessions(settings.connections)

    def backend(self, runtime: Runtime) -> AdvisoryBackend:
        self._sessions.users += 1
        return AdvisoryBackend(
            runtime,
            self._wire(runtime),
            partial(open_session, self._dialler),
            self._sessions,
            self._statements,
            self._settings,
            self.display,
        )


class AdvisoryBackend:
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
        self.runtime, self.wire, self.statements, self.display = runtime, wire, statements, display
        self._until_purge = PURGE_EVERY
        self.sessions = sessions
        self.talk: Talk = BlockingTalk() if runtime.blocking else AsyncTalk()
        self._dial, self._seconds = dial, settings.request_seconds
        self._keep = Keeping(sessions, self.talk, statements)
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

    async def _take_slots(
        self, session: Session, claim: Claim, *, join: bool, queued: bool
    ) -> Grant | Busy:
        """Takes the slots or keeps the turn, if it may wait; else leaves no trace."""
        if claim.limit > MOST_SLOTS:
            raise Unsupported(f"{self.display} has at most {MOST_SLOTS} slots in advisory mode")
        turn = self.statements.lock(claim.name, ":t")
        has_turn, was, free = await self._look_at_slots(session, claim, turn, queued)
        if was is not None and was != claim.limit:
            await self._rebind(session, claim, was, turn if has_turn else b"")
        if not has_turn:
            return Busy(0)
        if claim.weight > len(free):
            session.turn = join or queued
            if not session.turn:
                await self.ask(session, b"DO RELEASE_LOCK(%s)" % turn)
            return Busy(0, RECHECK_SECONDS)
        return await self._count_slots(session, claim, tuple(free[: claim.weight]), turn)

    async def _look_at_slots(
        self, session: Session, claim: Claim, turn: bytes, queued: bool
    ) -> tuple[bool, int | None, list[int]]:
        """Whether the turn is ours, what the name counts as, and which slots are free."""
        slots = self.statements.slots(claim.name, range(claim.limit))
        # A nap that was killed may have ended before it gave back the lock it is found by.
        nap = self.statements.lock(claim.name, ":n")
        ask = b"SELECT 1, RELEASE_LOCK(%s)" % nap if queued else b"SELECT GET_LOCK(%s, 0)" % turn
        look = b"SELECT " + b", ".join(b"IS_FREE_LOCK(%s)" % lock for lock in slots)
        capacity = self.statements.capacity(claim.name)
        got, counts, flags = await self._series(session, [ask, capacity, look])
        was = int(counts.rows[0][0] or 0) if counts.rows else None
        free = [slot for slot, flag in enumerate(flags.rows[0]) if flag == b"1"]
        return got.rows[0][0] == b"1", was, free

    async def _rebind(self, session: Session, claim: Claim, was: int, turn: bytes) -> None:
        """Makes the name what the claim says, if nobody uses it; raises ``LimitMismatch``."""
        if turn:
            (changed,) = await self.ask(session, self.statements.rebind(claim, was))
            if changed.affected:
                return
            await self.ask(session, b"DO RELEASE_LOCK(%s)" % turn)
        check_limit(claim, was, slots=was > 0, store=self.display)

    async def _count_slots(
        self, session: Session, claim: Claim, slots: tuple[int, ...], turn: bytes
    ) -> Grant | Busy:
        locks = [*self.statements.slots(claim.name, slots), hold_mark(mark_of(session))]
        taking = b"SELECT " + b", ".join(b"GET_LOCK(%s, 0)" % lock for lock in locks)
        counting = self.statements.count_slots(claim, slots, mark_of(session))
        free_turn = b"DO RELEASE_LOCK(%s)" % turn
        series = [taking, b"BEGIN", *counting, b"COMMIT", free_turn]
        taken, _, counted, *_ = await self._series(session, series)
        if counted.affected and all(value == b"1" for value in taken.rows[0]):
            return Grant(claim, counted.insert_id, slots)
        # Somebody made the name something else between our look and our count.
        session.connection.close()
        raise session.connection.broken(f"{claim.name!r} was changed meanwhile")

    async def _series(self, session: Session, statements: Sequence[bytes]) -> list[Result]:
        """The results of all; what a kill between two of them has cut short is given up."""
        results = await self.ask(session, b"; ".join(statements))
        if len(results) < len(statements):
            session.connection.close()
            raise session.connection.broken("its request was interrupted")
        return results

    async def ask(self, session: Session, sql: bytes) -> list[Result]:
        """One request on a session."""
        return session.connection.checked(await self._talk_to(session, sql))

    async def _talk_to(self, session: Session, sql: bytes) -> Reply:
        by = min(session.until, now() + self._seconds)
        return await self.talk.request(session, sql, by)

    async def _request(self, sql: bytes, until: float | None = None) -> list[Result]:
        return checked(await self.wire.request(sql, until=until), self.display)

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

    async def revoke(self, name: str) -> list[int]:
        (held,) = await self._request(self.statements.look([name]))
        tokens = list(dict.fromkeys(int(row[3] or 0) for row in held.rows))
        # By what only this hold has: its slots may be the next one's by the time of the kill.
        for mark in dict.fromkeys(int(row[7] or 0) for row in held.rows):
            await self.wire.request(b"KILL CONNECTION IS_USED_LOCK(%s)" % hold_mark(mark))
        patience = now() + ENDING_SECONDS
        while tokens and now() < patience:
            (left,) = await self._request(self.statements.look([name]))
            if not {int(row[3] or 0) for row in left.rows} & set(tokens):
                break
            await self.runtime.sleep(0.005)
        if any(int(row[1] or 0) >= 0 for row in held.rows):
            await self.wire.request(self.statements.stir(name))
        return tokens

    async def look(self, name: str) -> LockInfo:
        sql = self.statements.look([name]) + b"; " + self.statements.waiting(name)
        held, waiting = await self._request(sql)
        waiters = [waiter_of((row[0] or b"").decode(errors="replace")) for row in waiting.rows]
        holders, limit = holders_of(held.rows)
        return LockInfo(name, limit, holders, tuple(w for w in waiters if w is not None))

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        (page,) = await self._request(self.statements.page(prefix, cursor or "", limit))
        names = [(row[0] or b"").decode(errors="surrogateescape") for row in page.rows]
        if not names:
            return Page([], None)
        (held,) = await self._request(self.statements.look(names))
        by_name: dict[str, list[Row]] = {}
        for row in held.rows:
            by_name.setdefault((row[0] or b"").decode(errors="backslashreplace"), []).append(row)
        standings = [
            LockInfo(name, found[1], found[0], ())
            for name, rows in by_name.items()
            for found in [holders_of(rows)]
        ]
        return Page(standings, names[-1] if len(names) == limit else None)

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

    async def recall(self, name: str) -> Record | None:
        (kept,) = await self._request(self.statements.recall(name))
        for row in kept.rows:
            return read_record(row, name, self.display)
        return None

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(0.5, 1.0))
        await self.runtime.sleep(max(0.0, pause))

    async def _purge(self, until: float | None = None) -> None:
        """A bounded step, now and then."""
        if self._until_purge <= 0:
            self._until_purge = PURGE_EVERY
            await self._request(self.statements.purge(), until=until)
            await self.wire.request(self.statements.purge_transactions(), until=until)

    async def probe(self) -> list[Finding]:
        ttl = "the server ends a session that was idle for its ttl in whole seconds (wait_timeout)"
        queue = "waiters stand in the server's own queue, each with a connection"
        return [*await findings(self._request), Finding("waiting", queue), Finding("ttl", ttl)]

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


class Keeping(sql_advisory_keep.Keeping[Connection, bytes, Reply]):
    """A session may be idle for its ``wait_timeout``."""

    def __init__(self, sessions: Sessions, talk: Talk, statements: AdvisoryStatements) -> None:
        super().__init__(sessions, talk)
        self._statements = statements

    def touch(self, session: Session, claim: Claim) -> bytes:
        if session.grant is not None and session.grant.claim.ttl == claim.ttl:
            return b"DO 0"
        wait = b"SET SESSION wait_timeout = %d" % max(1, math.ceil(claim.ttl))
        return wait + b"; " + self._statements.set_ttl(claim)

    def kept(self, session: Session, grant: Grant) -> None:
        super().kept(session, grant)
        session.connection.ttl = max(1, math.ceil(grant.claim.ttl))

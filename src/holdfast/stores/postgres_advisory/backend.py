"""PostgreSQL advisory locks: a hold is a session that has the name's key.

A claim that does not fit sends the server the request that waits for the key and takes its token,
and reads the answer when it comes: the server's own queue is the line. The session's
``idle_session_timeout`` is the ttl, and every renewal starts it anew. It runs since the grant,
which may be as old as the request: a grant that may be old is renewed before it is told.

Waiters for slots queue for one key; the first of them, who has it, is woken by whoever frees one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from math import inf

from psycopg.pq.abc import PGresult

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import Finding, Renewal, Runtime, Settings, Waiting
from holdfast.errors import BackendUnavailable, LimitMismatch, Unsupported
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Dial, Dropped
from holdfast.stores._sql.session_aio import AsyncSessionDriver
from holdfast.stores._sql.session_blocking import BlockingSessionDriver, SessionDriver
from holdfast.stores.postgres.connection import (
    PostgresConnection,
    PostgresRefused,
    PostgresSession,
    PostgresSessions,
    first_value,
)
from holdfast.stores.postgres.inspect import findings
from holdfast.stores.postgres.shared import PostgresPool, SharedBackend, wake
from holdfast.stores.postgres.statement import Request
from holdfast.stores.postgres.wakeups import Listen, make_listening
from holdfast.stores.postgres_advisory.renew import Keeping
from holdfast.stores.postgres_advisory.requests import AdvisoryStatements, base_key

__all__ = ["AdvisoryBackend"]

RECHECK_SECONDS = 1.0
"""How often the first of those who wait for slots looks: a killed holder wakes nobody."""

FRESH_SHARE = 0.1
"""How much of a ttl may be over when a grant is told."""

_NEVER_RAN = ("57P01", "57P05")
"""The session had ended before the request was read: another one can be asked at once."""


class AdvisoryBackend(SharedBackend):
    """Admits claims by the server's own locks."""

    def __init__(
        self,
        runtime: Runtime,
        pool: PostgresPool,
        listen: Listen,
        dial: Dial[PostgresConnection],
        sessions: PostgresSessions,
        statements: AdvisoryStatements,
        settings: Settings,
        display: str,
    ) -> None:
        super().__init__(runtime, pool, statements, settings.namespace, display)
        self.statements, self.sessions = statements, sessions
        self.driver: SessionDriver[Request, PGresult] = (
            BlockingSessionDriver() if runtime.blocking else AsyncSessionDriver()
        )
        self._name, self._dial, self._seconds = settings.namespace, dial, settings.request_seconds
        channel = f"holdfast_{secrets.token_hex(8)}"
        self.channel = channel.encode()
        self.listening = make_listening(runtime, listen, channel, settings.request_seconds)
        self._keep = Keeping(sessions, self.driver, statements, self.namespace)
        self._noted: dict[int, int] = {}
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
        except PostgresRefused as error:
            raise self._refused(claim.name, error) from None
        finally:
            del asking[claim.owner]
            session = self.sessions.by_owner.get(claim.owner)
            if session is not None:
                session.until = inf

    async def _attempt(self, claim: Claim, join: bool, until: float) -> Grant | Busy:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.until = until
            answer = await self._go_on(session, claim)
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
            except PostgresRefused as error:
                if error.sqlstate not in _NEVER_RAN:
                    raise
                self.sessions.unknown.pop(claim.owner, None)
        session = await self.driver.open(self._dial, min(until, now() + self._seconds))
        session.until = until
        return await self._begin(session, claim, join)

    async def _begin(self, session: PostgresSession, claim: Claim, join: bool) -> Grant | Busy:
        """The first request for a claim, on a session that has nothing."""
        self.sessions.by_owner[claim.owner] = session
        answer = await self._take(session, claim, join=join)
        if isinstance(answer, Busy):
            if join:
                self._line_up(session, claim)
            else:
                del self.sessions.by_owner[claim.owner]
                self.sessions.give_back(session)
        return answer

    async def _take(self, session: PostgresSession, claim: Claim, *, join: bool) -> Grant | Busy:
        """Asks for the name; or for its slots once more, if it is the session's turn."""
        flags = (b"t" if join else b"f", b"t" if session.at_head else b"f")
        statement, asked = self.statements.take, (*self._asked(claim), *flags)
        if claim.mode is Mode.SLOTS:
            statement = self.statements.take_slots
            asked = (*asked, self.channel, wake(claim.owner))
        try:
            answer = self._told(claim, await self._ask(session, (statement, asked)))
        except LimitMismatch:
            self.sessions.let_go(claim.owner, session, clean=not session.at_head)
            raise
        except BaseException:
            self.sessions.lose(claim.owner, session)
            raise
        if isinstance(answer, Grant):
            session.grant, session.at_head = answer, False
        return answer

    def _asked(self, claim: Claim) -> tuple[bytes, ...]:
        slots = claim.mode is Mode.SLOTS
        how = (b"%d" % claim.weight, b"%d" % claim.limit) if slots else (claim.mode.encode(),)
        name, rest = claim.name.encode(), (b"%.6f" % claim.ttl, claim.label.encode())
        return (self.namespace, name, self._key(claim), *how, *rest)

    def _told(self, claim: Claim, answer: PGresult) -> Grant | Busy:
        reply = first_value(answer)
        if reply == b"C":
            raise Unsupported(
                f"the key of {claim.name!r} on {self.display} is that of another name: "
                "choose a different name"
            )
        return self._answered(claim, reply)

    def _key(self, claim: Claim) -> bytes:
        return b"%d" % base_key(self._name, claim.name)

    async def _ask(self, session: PostgresSession, request: Request) -> PGresult:
        by = min(session.until, now() + self._seconds)
        return await self.driver.request(session, request, by)

    def _line_up(self, session: PostgresSession, claim: Claim) -> None:
        """Sends the request that waits for the key; ``attempt`` reads its answer."""
        session.queued_at = now()
        statement, asked = self.statements.wait_take, self._asked(claim)
        if claim.mode is Mode.SLOTS:
            turn = base_key(self._name, claim.name) + 2
            statement, asked = self.statements.wait, (b"%d" % turn,)
        try:
            session.connection.send((statement, asked))
        except BackendUnavailable:
            self.sessions.lose(claim.owner, session)
            raise
        session.pending = True

    async def _go_on(self, session: PostgresSession, claim: Claim) -> Grant | Busy | None:
        """What has become of a claim that was asked before; nothing if its session broke."""
        if session.grant is not None:
            renewal = await self.renew([session.grant], [], until=session.until)
            if renewal.unknown:
                raise BackendUnavailable(renewal.unknown[claim.owner])
            return None if renewal.lost else session.grant
        if not session.at_head:
            try:
                told = await self.driver.collect_pending(session, now())
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
                return None
            if told is None:
                return Busy(0)
            if claim.mode is not Mode.SLOTS:
                return await self._come(session, claim, told)
            session.at_head = True
        heard = self.listening.hung
        answer = await self._take(session, claim, join=True)
        return Busy(0, RECHECK_SECONDS, heard) if isinstance(answer, Busy) else answer

    async def _come(
        self, session: PostgresSession, claim: Claim, told: PGresult
    ) -> Grant | Busy | None:
        """The turn of one who waited for the key: what it was granted then."""
        try:
            grant = self._told(claim, told)
        except BaseException:
            self.sessions.lose(claim.owner, session)
            raise
        if isinstance(grant, Busy):
            return grant
        session.grant = grant
        if now() - session.queued_at > FRESH_SHARE * claim.ttl:
            return await self._go_on(session, claim)
        return grant._replace(since=session.queued_at)

    async def _end_unknown(self, owner: str, until: float = inf) -> None:
        async def end(connection: PostgresConnection) -> None:
            parameters = (b"%d" % connection.pid, connection.started.encode())
            await self.pool.request((self.statements.end, parameters), until=until)

        await self.sessions.end_unknown(owner, end)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        if claim.owner in self._nudged:
            self._nudged.discard(claim.owner)
            return
        session = self.sessions.by_owner.get(claim.owner)
        if session is None:
            return
        if session.at_head:
            await self.listening.wait(wake(claim.owner).decode(), until, busy.ref)
        elif session.pending:
            await self.driver.wait_for_reply(session, until)

    def nudge(self, claim: Claim) -> None:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.nudge()
            self.listening.wake(wake(claim.owner).decode())
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
        by_owner = self.sessions.by_owner
        standing = {w.claim.owner: by_owner.get(w.claim.owner) for w in waits}
        alive = {o: s for o, s in standing.items() if s is not None and s.connection.open}
        await self._note_behind([(alive[c.owner], n) for c, n in waits if c.owner in alive], until)
        if self._until_purge <= 0:
            await self._purge(until)
        return Renewal(lost, unknown, frozenset(standing) - frozenset(alive))

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Whose session has ended: its socket says so before anybody asks."""
        return self._keep.glance(grants)

    async def _note_behind(self, waits: list[tuple[PostgresSession, int]], until: float) -> None:
        """For people who look: how many wait behind a waiter in its client."""
        noted = {session.connection.pid: behind for session, behind in waits}
        if noted != self._noted and any(noted.get(p) != self._noted.get(p, 0) for p in noted):
            parameters = (json.dumps(list(noted.items())).encode(),)
            with suppress(BackendUnavailable):  # for people only
                await self.pool.request((self.statements.behind, parameters), until=until)
        self._noted = noted

    async def release(self, grant: Grant) -> bool:
        owner = grant.claim.owner
        session = self.sessions.by_owner.get(owner)
        if session is None or session.grant is None:
            return False
        del self.sessions.by_owner[owner]
        try:
            answer = await self._ask(session, self._freeing(session.grant))
        except Dropped:
            self.sessions.lose(owner, session)
            await self._end_unknown(owner)
            return False
        except BaseException as error:
            self.sessions.lose(owner, session)
            if isinstance(error, PostgresRefused) and error.sqlstate.startswith("57P"):
                return False  # the server had ended the session
            raise
        ours = first_value(answer) == b"t"
        if ours:
            self.sessions.give_back(session)
        else:
            session.connection.close()
        if self._until_purge <= 0:
            await self._purge()
        return ours

    def _freeing(self, grant: Grant) -> Request:
        claim, key, token = grant.claim, self._key(grant.claim), b"%d" % grant.token
        if claim.mode is Mode.EXCLUSIVE:
            return self.statements.unlock, (key, token)
        if claim.mode is Mode.SHARED:
            return self.statements.unlock_shared, (key, token)
        slots = f"{{{','.join(map(str, grant.slots))}}}".encode()
        return self.statements.free_slots, (self.namespace, claim.name.encode(), key, slots, token)

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
                await self._leave(session)
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
            except BaseException:
                self.sessions.lose(claim.owner, session)
                raise
        self.listening.forget_ring(wake(claim.owner).decode())
        if claim.owner in self.sessions.unknown:
            await self._end_unknown(claim.owner, patience)

    async def _leave(self, session: PostgresSession) -> None:
        """Ends what a session has or waits for, and keeps the session."""
        if session.grant is not None and session.grant.claim.mode is Mode.SLOTS:
            await self._ask(session, self._freeing(session.grant))  # it wakes who is next
        elif session.pending:
            parameters = (b"%d" % session.connection.pid,)
            await self.pool.request((self.statements.cancel, parameters), until=session.until)
        await self._ask(session, (self.statements.leave, ()))
        self.sessions.give_back(session)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        session = self.sessions.by_owner.get(grant.claim.owner)
        if session is None or session.grant is None:
            return False
        parameters = (
            self.namespace,
            grant.claim.name.encode(),
            value.encode(),
            b"%d" % grant.token,
            b"%.6f" % min(keep_seconds, 3e9),
        )
        try:
            await self._ask(session, (self.statements.record, parameters))
        except BackendUnavailable:
            if not session.connection.open:
                self.sessions.lose(grant.claim.owner, session)
            raise
        return True

    async def probe(self) -> list[Finding]:
        ttl = "the server ends a session that was idle for its ttl (idle_session_timeout)"
        seen = await findings(self.pool.request, self.statements.settings, self.listening.detail)
        return [*seen, Finding("ttl", ttl)]

    def forget(self) -> None:
        self.sessions.forget()
        self.driver.forget()
        self.pool.forget()
        self.listening.forget()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.sessions.remove_user()
            self.driver.close()
        self.listening.close()
        await self.pool.close()

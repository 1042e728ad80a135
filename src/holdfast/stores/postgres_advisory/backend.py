"""The advisory store: a hold is a session that has the advisory lock of the name's key.

A claim that does not fit sends the request that waits for the key and then takes a token. Its
answer is read when it arrives: the queue is the server's own. The session's
``idle_session_timeout`` is the ttl, and every renewal restarts it. It runs from the moment of the
grant, which may be as early as the request: a grant that may be old is renewed before ``attempt``
returns it.

Waiters for slots queue for one key. The session that has this key is at the head of the queue; a
release of slots notifies it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from math import inf

from psycopg.pq.abc import PGresult

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.backoff import WATCH_POLL_SECONDS
from holdfast.core.contract import Finding, Guarantee, Page, Renewal, Runtime, Settings, Waiting
from holdfast.errors import BackendUnavailable, LimitMismatch, Unsupported
from holdfast.io.clock import now
from holdfast.stores._sql.advisory import SessionKeepAlive
from holdfast.stores._sql.connection import Dial, Dropped, SqlPool, make_pool
from holdfast.stores._sql.purge import PURGE_EVERY, PURGED_NAMES, attempts_until_purge
from holdfast.stores._sql.session import ended
from holdfast.stores._sql.session_aio import AsyncSessionDriver
from holdfast.stores._sql.session_blocking import BlockingSessionDriver, SessionDriver
from holdfast.stores.postgres.advisory_sql import base_key
from holdfast.stores.postgres.connect import PostgresConnector
from holdfast.stores.postgres.connection import (
    PostgresConnection,
    PostgresRefused,
    PostgresSession,
    PostgresSessions,
    first_value,
)
from holdfast.stores.postgres.replies import (
    as_error,
    findings,
    numbers,
    read_attempt,
    read_look,
    read_record,
    read_survey,
)
from holdfast.stores.postgres.schema import (
    PostgresSchema,
    Request,
    SharedStatements,
)
from holdfast.stores.postgres.wakeups import (
    make_wakeups,
    wakeup_key,
)
from holdfast.url import Url

__all__ = ["PostgresAdvisoryBackend", "PostgresAdvisoryStore"]

RECHECK_SECONDS = 1.0
"""How often the head of the queue for slots attempts again: a killed holder sends no wake-up."""

ABANDON_POLL_SECONDS = 0.005
"""How often ``abandon`` checks whether an attempt for the same owner has ended."""

FRESH_SHARE = 0.1
"""The part of a ttl that may be over when a grant is returned without a renewal."""

_NEVER_RAN = ("57P01", "57P05")
"""The session ended before the server read the request: another session can be used at once."""

_UNMARK = "pg_catalog.pg_advisory_unlock_shared($1 OPERATOR(pg_catalog.#) $2)"


class PostgresAdvisoryStatements(SharedStatements):
    """The statements of advisory mode, for one schema."""

    def __init__(self, schema: PostgresSchema) -> None:
        super().__init__(schema, "look_sessions", "survey_sessions", "terminate", "purge_counters")
        make = schema.statement
        self.take = make("take", "SELECT @take($1, $2, $3, $4, $5, $6, $7, $8)")
        eleven = ", ".join(f"${number}" for number in range(1, 12))
        self.take_slots = make("take_slots", f"SELECT @take_slots({eleven})")
        self.wait = make("wait", "SELECT pg_catalog.pg_advisory_lock($1)")
        self.wait_take = make("wait_take", "SELECT @wait_take($1, $2, $3, $4, $5, $6)")
        self.unlock = make("unlock", f"SELECT pg_catalog.pg_advisory_unlock($1) AND {_UNMARK}")
        self.unlock_shared = make(
            "unlock_shared", f"SELECT pg_catalog.pg_advisory_unlock_shared($1) AND {_UNMARK}"
        )
        self.free_slots = make("free_slots", "SELECT @free_slots($1, $2, $3, $4, $5)")
        self.leave = make("leave", "SELECT @leave()")
        self.cancel = make("cancel", "SELECT pg_catalog.pg_cancel_backend($1)")
        self.end = make("end", "SELECT @end_session($1, $2)")
        self.behind = make("behind", "SELECT @note_behind($1)")
        self.record = make("record", "SELECT @durable(true), @keep_record($1, $2, $3, $4, $5)")
        self.touch = make("touch", "")
        self.set_ttl = make("set_ttl", "SELECT @set_ttl($1, $2, $3)")
        self.prepared = (
            self.take, self.take_slots, self.wait, self.wait_take, self.unlock,
            self.unlock_shared, self.free_slots,
        )  # fmt: skip


class PostgresSessionKeepAlive(SessionKeepAlive[PostgresConnection, Request, PGresult]):
    """Renews sessions, which may be idle for their ``idle_session_timeout``."""

    def __init__(
        self,
        sessions: PostgresSessions,
        driver: SessionDriver[Request, PGresult],
        statements: PostgresAdvisoryStatements,
        namespace: bytes,
    ) -> None:
        super().__init__(sessions, driver)
        self._statements, self._namespace = statements, namespace

    def touch(self, session: PostgresSession, claim: Claim) -> Request:
        if session.grant is not None and session.grant.claim.ttl == claim.ttl:
            return self._statements.touch, ()
        parameters = (self._namespace, claim.name.encode(), b"%.6f" % claim.ttl)
        return self._statements.set_ttl, parameters


class PostgresAdvisoryStore:
    """Advisory locks: a hold ends with its connection, or when that is idle for its ttl."""

    guarantees = frozenset(Guarantee) - {
        Guarantee.SURVIVES_SERVER_LOSS,
        Guarantee.WATCH,
        Guarantee.FIFO,
    }
    shortest_ttl = 0.05
    longest_ttl = 2_000_000.0  # the server counts it in milliseconds of 31 bits
    whole_seconds = False

    def __init__(self, url: Url, settings: Settings) -> None:
        self.display = str(url)
        self._settings = settings
        self._connector = PostgresConnector(url, settings, "advisory")
        self._statements = PostgresAdvisoryStatements(self._connector.schema)
        self._sessions = PostgresSessions(settings.connections)

    def _dial(self, by: float) -> PostgresConnection:
        return self._connector.open((), by)

    def _dial_session(self, by: float) -> PostgresConnection:
        return self._connector.open_session(self._statements.prepared, by)

    def backend(self, runtime: Runtime) -> PostgresAdvisoryBackend:
        self._sessions.users += 1
        return PostgresAdvisoryBackend(
            runtime,
            make_pool(runtime, self._dial, self._settings, self.display),
            self._connector,
            self._dial_session,
            self._sessions,
            self._statements,
            self._settings,
            self.display,
        )


class PostgresAdvisoryBackend:
    """Admits claims by the server's own advisory locks."""

    def __init__(
        self,
        runtime: Runtime,
        pool: SqlPool[Request, PGresult],
        connector: PostgresConnector,
        dial: Dial[PostgresConnection],
        sessions: PostgresSessions,
        statements: PostgresAdvisoryStatements,
        settings: Settings,
        display: str,
    ) -> None:
        self.runtime, self.pool, self.display = runtime, pool, display
        self.namespace = settings.namespace.encode()
        self.statements, self.sessions = statements, sessions
        self.driver: SessionDriver[Request, PGresult] = (
            BlockingSessionDriver() if runtime.blocking else AsyncSessionDriver()
        )
        self._name, self._dial, self._seconds = settings.namespace, dial, settings.request_seconds
        channel = f"holdfast_{secrets.token_hex(8)}"
        self.channel = channel.encode()
        self._connector = connector
        self.wakeups = make_wakeups(runtime, connector.listen, channel, settings.request_seconds)
        self._keep_alive = PostgresSessionKeepAlive(
            sessions, self.driver, statements, self.namespace
        )
        self._until_purge = attempts_until_purge()
        self._behind: dict[int, int] = {}
        """By process id: the stored number of waiters behind each waiting session."""
        self._nudged: set[str] = set()
        """Owners that were nudged before they had a session to wait on."""
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
        except PostgresRefused as error:
            raise as_error(claim.name, self.display, error) from None
        finally:
            del attempting[claim.owner]
            session = self.sessions.by_owner.get(claim.owner)
            if session is not None:
                session.until = inf

    async def _attempt(self, claim: Claim, join: bool, until: float) -> Grant | Busy:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.until = until
            result = await self._continue(session, claim)
            if result is not None:
                return result
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
        """Sends the first request for a claim, on a session that holds nothing."""
        self.sessions.by_owner[claim.owner] = session
        result = await self._take(session, claim, join=join)
        if isinstance(result, Busy):
            if join:
                self._enqueue(session, claim)
            else:
                del self.sessions.by_owner[claim.owner]
                self.sessions.give_back(session)
        return result

    async def _take(self, session: PostgresSession, claim: Claim, *, join: bool) -> Grant | Busy:
        """Takes the name if it is free. Also retries slots for the head of their queue."""
        flags = (b"t" if join else b"f", b"t" if session.at_head else b"f")
        statement, parameters = self.statements.take, (*self._parameters(claim), *flags)
        if claim.mode is Mode.SLOTS:
            statement = self.statements.take_slots
            parameters = (*parameters, self.channel, wakeup_key(claim.owner))
        try:
            result = self._read(claim, await self._request(session, (statement, parameters)))
        except LimitMismatch:
            self.sessions.let_go(claim.owner, session, clean=not session.at_head)
            raise
        except BaseException:
            self.sessions.lose(claim.owner, session)
            raise
        if isinstance(result, Grant):
            session.grant, session.at_head = result, False
        return result

    def _parameters(self, claim: Claim) -> tuple[bytes, ...]:
        slots = claim.mode is Mode.SLOTS
        how = (b"%d" % claim.weight, b"%d" % claim.limit) if slots else (claim.mode.encode(),)
        name, rest = claim.name.encode(), (b"%.6f" % claim.ttl, claim.label.encode())
        return (self.namespace, name, self._key(claim), *how, *rest)

    def _read(self, claim: Claim, answer: PGresult) -> Grant | Busy:
        reply = first_value(answer)
        if reply == b"C":
            raise Unsupported(
                f"the key of {claim.name!r} on {self.display} is that of another name: "
                "choose a different name"
            )
        return read_attempt(claim, reply, self.display)

    def _key(self, claim: Claim) -> bytes:
        return b"%d" % base_key(self._name, claim.name)

    async def _request(self, session: PostgresSession, request: Request) -> PGresult:
        by = min(session.until, now() + self._seconds)
        return await self.driver.request(session, request, by)

    def _enqueue(self, session: PostgresSession, claim: Claim) -> None:
        """Sends the request that waits for the key. A later ``attempt`` reads its answer."""
        session.queued_at = now()
        statement, parameters = self.statements.wait_take, self._parameters(claim)
        if claim.mode is Mode.SLOTS:
            queue_key = base_key(self._name, claim.name) + 2
            statement, parameters = self.statements.wait, (b"%d" % queue_key,)
        try:
            session.connection.send((statement, parameters))
        except BackendUnavailable:
            self.sessions.lose(claim.owner, session)
            raise
        session.pending = True

    async def _continue(self, session: PostgresSession, claim: Claim) -> Grant | Busy | None:
        """Returns the result of a claim that has a session already; None if its session broke."""
        if session.grant is not None:
            renewal = await self.renew([session.grant], [], until=session.until)
            if renewal.unknown:
                raise BackendUnavailable(renewal.unknown[claim.owner])
            return None if renewal.lost else session.grant
        if not session.at_head:
            try:
                answer = await self.driver.collect_pending(session, now())
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
                return None
            if answer is None:
                return Busy(0)
            if claim.mode is not Mode.SLOTS:
                return await self._admitted(session, claim, answer)
            session.at_head = True
        generation = self.wakeups.generation
        result = await self._take(session, claim, join=True)
        return Busy(0, RECHECK_SECONDS, generation) if isinstance(result, Busy) else result

    async def _admitted(
        self, session: PostgresSession, claim: Claim, answer: PGresult
    ) -> Grant | Busy | None:
        """Returns the grant of a claim that has waited for the key; renews a grant that is old."""
        try:
            grant = self._read(claim, answer)
        except BaseException:
            self.sessions.lose(claim.owner, session)
            raise
        if isinstance(grant, Busy):
            return grant
        session.grant = grant
        old = now() - session.queued_at > FRESH_SHARE * claim.ttl
        if old or ended([session]):  # it may have been broken before its answer was read
            return await self._continue(session, claim)
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
            await self.wakeups.wait(wakeup_key(claim.owner).decode(), until, busy.ref)
        elif session.pending:
            await self.driver.wait_for_reply(session, until)

    def nudge(self, claim: Claim) -> None:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.nudge()
            self.wakeups.wake(wakeup_key(claim.owner).decode())
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
        lost, unknown = await self._keep_alive.renew(grants, until, shorten)
        by_owner = self.sessions.by_owner
        waiting = {w.claim.owner: by_owner.get(w.claim.owner) for w in waits}
        alive = {o: s for o, s in waiting.items() if s is not None and s.connection.open}
        await self._note_behind([(alive[c.owner], n) for c, n in waits if c.owner in alive], until)
        if self._until_purge <= 0:
            await self._purge(until)
        return Renewal(lost, unknown, frozenset(waiting) - frozenset(alive))

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Returns the owners whose session has ended, with a reason. Reads sockets only."""
        return self._keep_alive.glance(grants)

    async def _note_behind(self, waits: list[tuple[PostgresSession, int]], until: float) -> None:
        """Stores how many waiters of its client are behind each waiting session, for people."""
        behind = {session.connection.pid: count for session, count in waits}
        if behind != self._behind and any(behind.get(p) != self._behind.get(p, 0) for p in behind):
            parameters = (json.dumps(list(behind.items())).encode(),)
            with suppress(BackendUnavailable):  # for people only
                await self.pool.request((self.statements.behind, parameters), until=until)
        self._behind = behind

    async def release(self, grant: Grant) -> bool | None:
        owner = grant.claim.owner
        session = self.sessions.by_owner.get(owner)
        if session is None or session.grant is None:
            return False
        del self.sessions.by_owner[owner]
        gone = bool(ended([session]))
        try:
            answer = await self._request(session, self._release_request(session.grant))
        except Dropped:
            self.sessions.lose(owner, session)
            await self._end_unknown(owner)
            return False if gone else None  # it may have run before the connection was cut
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

    def _release_request(self, grant: Grant) -> Request:
        claim, key, token = grant.claim, self._key(grant.claim), b"%d" % grant.token
        if claim.mode is Mode.EXCLUSIVE:
            return self.statements.unlock, (key, token)
        if claim.mode is Mode.SHARED:
            return self.statements.unlock_shared, (key, token)
        slots = f"{{{','.join(map(str, grant.slots))}}}".encode()
        return self.statements.free_slots, (self.namespace, claim.name.encode(), key, slots, token)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        by = now() + self._seconds
        if until is not None:
            by = min(by, until)
        while claim.owner in self.sessions.attempting and now() < by:
            await self.runtime.sleep(ABANDON_POLL_SECONDS)  # after the attempt that is running
        self._nudged.discard(claim.owner)
        session = self.sessions.by_owner.pop(claim.owner, None)
        if session is not None:
            try:
                session.until = by
                await self._leave(session)
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
            except BaseException:
                self.sessions.lose(claim.owner, session)
                raise
        self.wakeups.discard(wakeup_key(claim.owner).decode())
        if claim.owner in self.sessions.unknown:
            await self._end_unknown(claim.owner, by)

    async def _leave(self, session: PostgresSession) -> None:
        """Ends what a session holds or waits for, and keeps the session."""
        if session.grant is not None and session.grant.claim.mode is Mode.SLOTS:
            # This request notifies the next waiter; ``leave`` does not.
            await self._request(session, self._release_request(session.grant))
        elif session.pending:
            parameters = (b"%d" % session.connection.pid,)
            await self.pool.request((self.statements.cancel, parameters), until=session.until)
        await self._request(session, (self.statements.leave, ()))
        self.sessions.give_back(session)

    async def _purge(self, until: float | None = None) -> None:
        """Drops idle names, in a bounded step. A failed step is repeated later."""
        self._until_purge = PURGE_EVERY
        parameters = (self.namespace, b"%d" % PURGED_NAMES)
        with suppress(BackendUnavailable):
            await self.pool.request((self.statements.purge, parameters), until=until)

    async def _request_any(self, name: str, request: Request) -> PGresult:
        """Sends a request about one name on any connection. Raises ``Incompatible`` if a stored
        value is damaged."""
        try:
            return await self.pool.request(request)
        except PostgresRefused as error:
            raise as_error(name, self.display, error) from None

    async def revoke(self, name: str) -> list[int]:
        request = self.statements.revoke, (self.namespace, name.encode())
        return numbers(first_value(await self._request_any(name, request)))

    async def look(self, name: str) -> LockInfo:
        request = self.statements.look, (self.namespace, name.encode())
        return read_look(await self._request_any(name, request), name, self.display)

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        after = (cursor or "").encode()
        parameters = (self.namespace, prefix.encode(), after, b"%d" % limit)
        return read_survey(await self.pool.request((self.statements.survey, parameters)), limit)

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
            await self._request(session, (self.statements.record, parameters))
        except BackendUnavailable:
            if not session.connection.open:
                self.sessions.lose(grant.claim.owner, session)
            raise
        return True

    async def recall(self, name: str) -> Record | None:
        request = self.statements.recall, (self.namespace, name.encode())
        return read_record(await self._request_any(name, request), name, self.display)

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(*WATCH_POLL_SECONDS))
        await self.runtime.sleep(max(0.0, pause))

    async def probe(self) -> list[Finding]:
        ttl = "the server ends a session that was idle for its ttl (idle_session_timeout)"
        seen, stored = await self._connector.examine(self.runtime)
        return [*findings(seen, self.wakeups.finding), Finding("ttl", ttl), *stored]

    def forget(self) -> None:
        self._until_purge = attempts_until_purge()
        self.sessions.forget()
        self.driver.forget()
        self.pool.forget()
        self.wakeups.forget()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.sessions.remove_user()
            self.driver.close()
        self.wakeups.close()
        await self.pool.close()

"""The advisory store: a hold is a session that has the advisory lock of the name's key.

A claim that does not fit sends the request that waits for the key and then takes a token: the queue
is the server's own. The session's ``idle_session_timeout`` is the ttl. The rules are in
``_sql.advisory``.

Waiters for slots queue for one key. The session that has this key is at the head of the queue; a
release of slots notifies it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress

from psycopg.pq.abc import PGresult

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.contract import Finding, Guarantee, Page, Renewal, Runtime, Settings, Waiting
from holdfast.errors import BackendUnavailable, LimitMismatch, Unsupported
from holdfast.io.clock import now
from holdfast.io.connection import World
from holdfast.stores._sql.advisory import RECHECK_SECONDS, AdvisoryBackend
from holdfast.stores._sql.connection import Dial, SqlPool
from holdfast.stores._sql.purge import PURGE_EVERY, PURGED_NAMES
from holdfast.stores.postgres.advisory_sql import base_key
from holdfast.stores.postgres.connect import PostgresConnector
from holdfast.stores.postgres.connection import (
    PostgresConnection,
    PostgresRefused,
    PostgresSession,
    PostgresSessions,
    checked,
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
from holdfast.stores.postgres.wakeups import PostgresWakeups, wakeup_key
from holdfast.url import Url

__all__ = ["PostgresAdvisoryBackend", "PostgresAdvisoryStore"]

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

    async def _dial(self, world: World, until: float) -> PostgresConnection:
        return await self._connector.open((), world, until)

    async def _dial_session(self, world: World, until: float) -> PostgresConnection:
        return await self._connector.open_session(self._statements.prepared, world, until)

    def backend(self, runtime: Runtime) -> PostgresAdvisoryBackend:
        self._sessions.users += 1
        return PostgresAdvisoryBackend(
            runtime,
            SqlPool(runtime, self._dial, self._settings, self.display, checked),
            self._connector,
            self._dial_session,
            self._sessions,
            self._statements,
            self._settings,
            self.display,
        )


class PostgresAdvisoryBackend(AdvisoryBackend[PostgresConnection]):
    """Admits claims by the server's own advisory locks."""

    pool: SqlPool[Request, PGresult]

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
        super().__init__(runtime, pool, sessions, dial, settings.request_seconds)
        self.display, self.statements = display, statements
        self.namespace, self._name = settings.namespace.encode(), settings.namespace
        channel = f"holdfast_{secrets.token_hex(8)}"
        self.channel = channel.encode()
        self._connector = connector
        self.wakeups = PostgresWakeups(runtime, connector, channel, settings.request_seconds)
        self._behind: dict[int, int] = {}
        """By process id: the stored number of waiters behind each waiting session."""

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        try:
            return await super().attempt(claim, join=join, until=until)
        except PostgresRefused as error:
            raise as_error(claim.name, self.display, error) from None

    async def _had_ended(self, owner: str, error: BackendUnavailable, until: float) -> bool:
        if not isinstance(error, PostgresRefused) or error.sqlstate not in _NEVER_RAN:
            return False
        self.sessions.unknown.pop(owner, None)
        return True

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

    def _enqueue(self, session: PostgresSession, claim: Claim) -> None:
        session.queued_at = now()
        statement, parameters = self.statements.wait_take, self._parameters(claim)
        if claim.mode is Mode.SLOTS:
            queue_key = base_key(self._name, claim.name) + 2
            statement, parameters = self.statements.wait, (b"%d" % queue_key,)
        self._send(session, claim, (statement, parameters))

    async def _resume(self, session: PostgresSession, claim: Claim) -> Grant | Busy | None:
        if not session.at_head:
            try:
                by = min(session.until, now() + self._seconds)
                answer = await self.driver.collect_pending(session, by)
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
                return None
            if answer is None:
                return Busy(0)
            if claim.mode is not Mode.SLOTS:
                return await self._read_grant(session, claim, answer)
            session.at_head = True
        generation = self.wakeups.generation
        result = await self._take(session, claim, join=True)
        return Busy(0, RECHECK_SECONDS, generation) if isinstance(result, Busy) else result

    async def _read_grant(
        self, session: PostgresSession, claim: Claim, answer: PGresult
    ) -> Grant | Busy | None:
        try:
            grant = self._read(claim, answer)
        except BaseException:
            self.sessions.lose(claim.owner, session)
            raise
        return grant if isinstance(grant, Busy) else await self._admitted(session, claim, grant)

    async def _end_session(self, connection: PostgresConnection, until: float) -> None:
        parameters = (b"%d" % connection.pid, connection.started.encode())
        await self.pool.request((self.statements.end, parameters), until=until)

    async def _wait(self, session: PostgresSession, claim: Claim, busy: Busy, until: float) -> None:
        if session.at_head:
            await self.wakeups.wait_for(wakeup_key(claim.owner).decode(), until, busy.ref)
        elif session.pending:
            await self.driver.wait_for_reply(session, until)

    def nudge(self, claim: Claim) -> None:
        super().nudge(claim)
        if claim.owner in self.sessions.by_owner:
            self.wakeups.wake(wakeup_key(claim.owner).decode())

    def _touch(self, session: PostgresSession, claim: Claim) -> Request:
        if session.grant is not None and session.grant.claim.ttl == claim.ttl:
            return self.statements.touch, ()
        parameters = (self.namespace, claim.name.encode(), b"%.6f" % claim.ttl)
        return self.statements.set_ttl, parameters

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        lost, unknown = await self._renew_sessions(grants, until, shorten)
        by_owner = self.sessions.by_owner
        waiting = {w.claim.owner: by_owner.get(w.claim.owner) for w in waits}
        alive = {o: s for o, s in waiting.items() if s is not None and s.connection.open}
        await self._note_behind([(alive[c.owner], n) for c, n in waits if c.owner in alive], until)
        await self._purge(until)
        return Renewal(lost, unknown, frozenset(waiting) - frozenset(alive))

    async def _note_behind(self, waits: list[tuple[PostgresSession, int]], until: float) -> None:
        """Stores how many waiters of its client are behind each waiting session, for people."""
        behind = {session.connection.pid: count for session, count in waits}
        if behind != self._behind and any(behind.get(p) != self._behind.get(p, 0) for p in behind):
            parameters = (json.dumps(list(behind.items())).encode(),)
            with suppress(BackendUnavailable):  # for people only
                await self.pool.request((self.statements.behind, parameters), until=until)
        self._behind = behind

    async def release(self, grant: Grant) -> bool | None:
        try:
            return await super().release(grant)
        except PostgresRefused as error:
            if error.sqlstate.startswith("57P"):
                return False  # the server had ended the session
            raise

    async def _release(self, session: PostgresSession, grant: Grant) -> bool:
        return first_value(await self._request(session, self._release_request(grant))) == b"t"

    def _release_request(self, grant: Grant) -> Request:
        claim, key, token = grant.claim, self._key(grant.claim), b"%d" % grant.token
        if claim.mode is Mode.EXCLUSIVE:
            return self.statements.unlock, (key, token)
        if claim.mode is Mode.SHARED:
            return self.statements.unlock_shared, (key, token)
        slots = f"{{{','.join(map(str, grant.slots))}}}".encode()
        return self.statements.free_slots, (self.namespace, claim.name.encode(), key, slots, token)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        try:
            await super().abandon(claim, until=until)
        finally:
            self.wakeups.discard(wakeup_key(claim.owner).decode())

    async def _leave(self, session: PostgresSession, claim: Claim) -> None:
        if session.grant is not None and session.grant.claim.mode is Mode.SLOTS:
            # This request notifies the next waiter; ``leave`` does not.
            await self._request(session, self._release_request(session.grant))
        elif session.pending:
            parameters = (b"%d" % session.connection.pid,)
            await self.pool.request((self.statements.cancel, parameters), until=session.until)
        await self._request(session, (self.statements.leave, ()))
        self.sessions.give_back(session)

    async def _purge(self, until: float | None = None) -> None:
        """A failed step is repeated later."""
        if self._until_purge > 0:
            return
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

    async def probe(self) -> list[Finding]:
        ttl = "the server ends a session that was idle for its ttl (idle_session_timeout)"
        seen, stored = await self._connector.examine(self.runtime)
        return [*findings(seen, self.wakeups.finding), Finding("ttl", ttl), *stored]

    def forget(self) -> None:
        super().forget()
        self.wakeups.forget()

    async def close(self) -> None:
        await super().close()
        self.wakeups.close()

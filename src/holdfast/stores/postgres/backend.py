"""The lease store: every operation is one call of one function on the server.

The functions are in ``sql``. Waiters listen on one connection per backend, opened by the first
wait (``wakeups``). A release wakes the next waiter and may tell it the token of its direct grant.

``Grant.ref`` is True if the grant was waited for. ``Busy.ref`` is the last token of the name and
the generation of the subscription, both from before the wait.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress

from psycopg.pq.abc import PGresult

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.backoff import WATCH_POLL_SECONDS
from holdfast.core.contract import (
    DIRECT_GRANT_SECONDS,
    Finding,
    Guarantee,
    Page,
    Renewal,
    Runtime,
    Settings,
    Waiting,
)
from holdfast.errors import BackendUnavailable
from holdfast.io.connection import World
from holdfast.stores._sql.connection import SqlPool
from holdfast.stores._sql.purge import PURGE_EVERY, PURGED_NAMES, attempts_until_purge
from holdfast.stores.postgres.connect import PostgresConnector
from holdfast.stores.postgres.connection import (
    PostgresConnection,
    PostgresRefused,
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

__all__ = ["PostgresLeaseBackend", "PostgresLeaseStore"]

MOST_HINTS = 4096


class PostgresLeaseStatements(SharedStatements):
    """The statements of lease mode, for one schema."""

    def __init__(self, schema: PostgresSchema) -> None:
        super().__init__(schema, "look", "survey", "revoke", "purge")
        make = schema.statement
        eleven = ", ".join(f"${number}" for number in range(1, 12))
        self.attempt = make("attempt", f"SELECT @attempt({eleven})")
        self.attempt_again = make("attempt_again", f"SELECT @attempt_locked({eleven})")
        self.join = make("join", f"SELECT @join({eleven})")
        self.exchange = make("exchange", f"SELECT @exchange({eleven})")
        self.release = make("release", "CALL @hand_over($1, $2, $3, $4)")
        self.ready = schema.filled("CALL @hand_over('', '', '', NULL)").encode()
        """Plans the statements of a release and changes nothing."""
        self.abandon = make("abandon", "SELECT @abandon($1, $2, $3)")
        self.take_over = make("take_over", "SELECT @take_over($1, $2, $3, $4, $5, $6, $7)")
        self.renew = make("renew", "SELECT @renew($1, $2, $3)")
        self.purge_counters = make("purge_counters", "SELECT @purge_counters($1, NULL, $2)")
        self.record = make("record", "SELECT @record($1, $2, $3, $4, $5, $6)")
        self.prepared = (
            self.attempt,
            self.attempt_again,
            self.join,
            self.exchange,
            self.release,
            self.abandon,
            self.renew,
        )


class PostgresLeaseStore:
    """Lease rows: a hold ends by itself with its ttl."""

    guarantees = frozenset(Guarantee) - {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.WATCH}
    shortest_ttl = 0.05
    longest_ttl = 10 * 365 * 86400.0
    whole_seconds = False

    def __init__(self, url: Url, settings: Settings) -> None:
        self.display = str(url)
        self._settings = settings
        self._connector = PostgresConnector(url, settings, "lease")
        self._statements = PostgresLeaseStatements(self._connector.schema)

    async def _dial(self, world: World, until: float) -> PostgresConnection:
        return await self._connector.open(self._statements.prepared, world, until)

    def backend(self, runtime: Runtime) -> PostgresLeaseBackend:
        return PostgresLeaseBackend(
            runtime,
            SqlPool(runtime, self._dial, self._settings, self.display, checked),
            self._connector,
            self._statements,
            self._settings,
            self.display,
        )


class PostgresLeaseBackend:
    """Admits claims in the rows of one namespace."""

    def __init__(
        self,
        runtime: Runtime,
        pool: SqlPool[Request, PGresult],
        connector: PostgresConnector,
        statements: PostgresLeaseStatements,
        settings: Settings,
        display: str,
    ) -> None:
        self.runtime, self.pool, self.display = runtime, pool, display
        self.namespace, self.statements = settings.namespace.encode(), statements
        channel = f"holdfast_{secrets.token_hex(8)}"
        self.channel = channel.encode()
        self._connector = connector
        shared = None if connector.has_listen_url else pool
        self.wakeups = PostgresWakeups(
            runtime, connector, channel, settings.request_seconds, shared, statements.ready
        )
        self._until_purge = attempts_until_purge()
        self._queued: dict[str, bool] = {}
        self._contended: dict[str, bool] = {}
        """Owners that are in a queue, and names that had waiters. These are hints: with them the
        server does not try the uncontended way first."""

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        parameters = (*self._parameters(claim), b"t" if join else b"f")
        was_queued = self._queued.pop(claim.owner, False)
        statement = self.statements.attempt
        if was_queued or claim.name in self._contended:
            joins = join and claim.mode is Mode.EXCLUSIVE
            statement = self.statements.join if joins else self.statements.attempt_again
        generation = self.wakeups.generation
        answer = await self._request(claim.name, (statement, parameters), claim.owner, until)
        self._until_purge -= 1
        result = read_attempt(claim, first_value(answer), self.display)
        if isinstance(result, Grant):
            if was_queued:
                return result._replace(ref=True)
            self._contended.pop(claim.name, None)
            return result
        self._note_busy(claim, join)
        return result._replace(ref=(result.ref, generation))

    def _note_busy(self, claim: Claim, queued: bool) -> None:
        if len(self._contended) >= MOST_HINTS:
            self._contended.clear()
        self._contended[claim.name] = True
        if queued:
            if len(self._queued) >= MOST_HINTS:  # of waiters that the renewer has abandoned
                self._queued.clear()
            self._queued[claim.owner] = True

    def _parameters(self, claim: Claim) -> tuple[bytes, ...]:
        return (
            self.namespace,
            claim.name.encode(),
            claim.owner.encode(),
            claim.mode.encode(),
            b"%d" % claim.weight,
            b"%d" % claim.limit,
            b"%.6f" % claim.ttl,
            claim.label.encode(),
            self.channel,
            wakeup_key(claim.owner) + _direct_grant_seconds(claim),
        )

    async def _request(
        self, name: str, request: Request, owner: str = "", until: float | None = None
    ) -> PGresult:
        """Sends a request about one name. Raises ``Incompatible`` if a stored value is damaged."""
        try:
            return await self.pool.request(request, owner, until)
        except PostgresRefused as error:
            raise as_error(name, self.display, error) from None

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        last, generation = busy.ref
        token = await self.wakeups.wait_for(wakeup_key(claim.owner).decode(), until, generation)
        # A wake-up may have been under way since before the attempt that this wait follows.
        if token is None or last is None or token <= last:
            return None
        self._queued.pop(claim.owner, None)
        return Grant(claim, token, ref=True, seconds=min(DIRECT_GRANT_SECONDS, claim.ttl))

    def nudge(self, claim: Claim) -> None:
        self.wakeups.wake(wakeup_key(claim.owner).decode())

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        if grant.claim.name != claim.name:
            return await self.release(grant), await self.attempt(claim, join=True)
        namespace, name, *others = self._parameters(claim)
        parameters = (namespace, name, grant.claim.owner.encode(), *others)
        generation = self.wakeups.generation
        request = self.statements.exchange, parameters
        answer = await self._request(claim.name, request, claim.owner)
        ours, rest = first_value(answer).split(b" ", 1)
        result = read_attempt(claim, rest, self.display)
        return ours == b"1", result._replace(
            ref=True if isinstance(result, Grant) else (result.ref, generation)
        )

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        held = [(g.claim.name, g.claim.owner, g.claim.ttl, shorten) for g in grants]
        waiting = [(claim.owner, behind) for claim, behind in waits]
        parameters = (self.namespace, json.dumps(held).encode(), json.dumps(waiting).encode())
        answer = await self.pool.request((self.statements.renew, parameters), until=until)
        lost, forgotten = first_value(answer).split(b";")
        if self._until_purge <= 0:
            await self._purge(until)
        reason = "it ran out or was broken, and is no longer stored"
        return Renewal(
            {held[i - 1][1]: reason for i in numbers(lost)},
            forgotten=frozenset(waiting[i - 1][0] for i in numbers(forgotten)),
        )

    async def release(self, grant: Grant) -> bool:
        claim = grant.claim
        waited = b"t" if grant.ref else b"f"
        parameters = (self.namespace, claim.name.encode(), claim.owner.encode(), waited)
        request = self.statements.release, parameters
        answer = await self._request(claim.name, request, claim.owner)
        if self._until_purge <= 0:
            await self._purge()
        return first_value(answer) == b"t"

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        return ()  # a hold is in a row, and ends with its ttl

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        namespace, name, owner, _, _, _, ttl, label, *_ = self._parameters(claim)
        old = grant.claim.owner.encode(), b"%d" % grant.token
        request = self.statements.take_over, (namespace, name, *old, owner, ttl, label)
        found = first_value(await self._request(claim.name, request, claim.owner, until))
        if not found:
            return None
        taken = read_attempt(claim, found, self.display)
        # Waiters may stand behind it: its release looks for them.
        return taken._replace(ref=True) if isinstance(taken, Grant) else None

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        self._queued.pop(claim.owner, None)
        parameters = (self.namespace, claim.name.encode(), claim.owner.encode())
        request = self.statements.abandon, parameters
        await self._request(claim.name, request, claim.owner, until)
        self.wakeups.discard(wakeup_key(claim.owner).decode())

    async def _purge(self, until: float | None = None) -> None:
        """Drops idle names: a bounded step through the lock rows, and one through the counters
        that ``transaction_lock`` has beside them. A failed step is repeated later."""
        self._until_purge = PURGE_EVERY
        parameters = (self.namespace, b"%d" % PURGED_NAMES)
        for statement in (self.statements.purge, self.statements.purge_counters):
            with suppress(BackendUnavailable):
                await self.pool.request((statement, parameters), until=until)

    async def revoke(self, name: str) -> list[int]:
        parameters = (self.namespace, name.encode())
        return numbers(first_value(await self._request(name, (self.statements.revoke, parameters))))

    async def look(self, name: str) -> LockInfo:
        parameters = (self.namespace, name.encode())
        answer = await self._request(name, (self.statements.look, parameters))
        return read_look(answer, name, self.display)

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        after = (cursor or "").encode()
        parameters = (self.namespace, prefix.encode(), after, b"%d" % limit)
        return read_survey(await self.pool.request((self.statements.survey, parameters)), limit)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        claim = grant.claim
        parameters = (
            self.namespace,
            claim.name.encode(),
            claim.owner.encode(),
            value.encode(),
            b"%d" % grant.token,
            b"%.6f" % min(keep_seconds, 3e9),
        )
        answer = await self._request(claim.name, (self.statements.record, parameters))
        return first_value(answer) == b"t"

    async def recall(self, name: str) -> Record | None:
        parameters = (self.namespace, name.encode())
        answer = await self._request(name, (self.statements.recall, parameters))
        return read_record(answer, name, self.display)

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(*WATCH_POLL_SECONDS))
        await self.runtime.sleep(max(0.0, pause))

    async def probe(self) -> list[Finding]:
        seen, stored = await self._connector.examine(self.runtime)
        return [*findings(seen, self.wakeups.finding), *stored]

    def forget(self) -> None:
        self._queued, self._contended = {}, {}
        self._until_purge = attempts_until_purge()
        self.pool.forget()
        self.wakeups.forget()

    async def close(self) -> None:
        self.wakeups.close()
        self.pool.close()


def _direct_grant_seconds(claim: Claim) -> bytes:
    """Returns the second word of a waiter's ``ring``: how long a direct grant lasts. Only an
    exclusive claim can be granted directly."""
    exclusive = claim.mode is Mode.EXCLUSIVE
    return b" %.6f" % min(DIRECT_GRANT_SECONDS, claim.ttl) if exclusive else b""

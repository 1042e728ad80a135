"""PostgreSQL lease rows: every operation is one call of one function on the server.

The functions are in ``postgres_lease_sql``; here are the calls, and the waiting: LISTEN on one
connection per backend, opened by the first wait, where a release wakes the one who is next, and
tells it of its grant. A grant's ``ref`` says whether it was waited for.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import (
    DIRECT_GRANT_SECONDS,
    Finding,
    Renewal,
    Runtime,
    Settings,
    Waiting,
)
from holdfast.errors import BackendUnavailable
from holdfast.stores.postgres.connection import first_value
from holdfast.stores.postgres.inspect import findings
from holdfast.stores.postgres.schema import Schema
from holdfast.stores.postgres.shared import (
    PURGE_EVERY,
    PostgresPool,
    SharedBackend,
    SharedStatements,
    ints,
    wake,
)
from holdfast.stores.postgres.wakeups import Listen, make_listening

__all__ = ["LeaseBackend", "LeaseStatements"]

MOST_HINTS = 4096


class LeaseStatements(SharedStatements):
    """The requests, as they read in one schema."""

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema, "look", "survey", "revoke", "purge")
        say = schema.statement
        places = ", ".join(f"${number}" for number in range(1, 12))
        self.attempt = say("attempt", f"SELECT @attempt({places})")
        self.attempt_again = say("attempt_again", f"SELECT @attempt_locked({places})")
        self.join = say("join", f"SELECT @join({places})")
        self.exchange = say("exchange", f"SELECT @exchange({places})")
        self.release = say("release", "CALL @hand_over($1, $2, $3, $4)")
        self.ready = schema.filled("CALL @hand_over('', '', '', NULL)").encode()
        self.abandon = say("abandon", "SELECT @abandon($1, $2, $3)")
        self.renew = say("renew", "SELECT @renew($1, $2, $3)")
        self.purge_counters = say("purge_counters", "SELECT @purge_counters($1, $2, $3)")
        self.record = say("record", "SELECT @record($1, $2, $3, $4, $5, $6)")
        self.prepared = (
            self.attempt,
            self.attempt_again,
            self.join,
            self.exchange,
            self.release,
            self.abandon,
            self.renew,
        )


class LeaseBackend(SharedBackend):
    """Admits claims in the rows of one namespace."""

    def __init__(
        self,
        runtime: Runtime,
        pool: PostgresPool,
        listen: Listen,
        statements: LeaseStatements,
        settings: Settings,
        display: str,
        listens_apart: bool = False,
    ) -> None:
        super().__init__(runtime, pool, statements, settings.namespace, display)
        self.statements = statements
        channel = f"holdfast_{secrets.token_hex(8)}"
        self.channel = channel.encode()
        shared = None if listens_apart else pool
        self.listening = make_listening(
            runtime, listen, channel, settings.request_seconds, shared, statements.ready
        )
        self._purged_counters_to = b""
        self._standing: dict[str, bool] = {}
        self._crowded: dict[str, bool] = {}
        """Who stands in line, and for which names somebody did: hints, so that the server need
        not try the usual way first."""

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        parameters = (*self._asked(claim), b"t" if join else b"f")
        standing = self._standing
        stands = standing.pop(claim.owner, False)
        statement = self.statements.attempt
        if stands or claim.name in self._crowded:
            joins = join and claim.mode is Mode.EXCLUSIVE
            statement = self.statements.join if joins else self.statements.attempt_again
        heard = self.listening.hung
        answer = await self._about(claim.name, (statement, parameters), claim.owner, until)
        self._until_purge -= 1
        told = self._answered(claim, first_value(answer))
        if isinstance(told, Grant):
            if stands:
                return told._replace(ref=True)
            self._crowded.pop(claim.name, None)
            return told
        self._note(claim, join)
        return told._replace(ref=(told.ref, heard))

    def _note(self, claim: Claim, stands: bool) -> None:
        if len(self._crowded) >= MOST_HINTS:
            self._crowded.clear()
        self._crowded[claim.name] = True
        if stands:
            if len(self._standing) >= MOST_HINTS:  # of waiters that the renewer has undone
                self._standing.clear()
            self._standing[claim.owner] = True

    def _asked(self, claim: Claim) -> tuple[bytes, ...]:
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
            wake(claim.owner) + _handed(claim),
        )

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        last, heard = busy.ref
        token = await self.listening.wait(wake(claim.owner).decode(), until, heard)
        # A ring may have been under way since before the attempt whose answer this waits on.
        if token is None or last is None or token <= last:
            return None
        self._standing.pop(claim.owner, None)
        return Grant(claim, token, ref=True, seconds=min(DIRECT_GRANT_SECONDS, claim.ttl))

    def nudge(self, claim: Claim) -> None:
        self.listening.wake(wake(claim.owner).decode())

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        if grant.claim.name != claim.name:
            return await self.release(grant), await self.attempt(claim, join=True)
        namespace, name, *asked = self._asked(claim)
        parameters = (namespace, name, grant.claim.owner.encode(), *asked)
        heard = self.listening.hung
        request = self.statements.exchange, parameters
        answer = await self._about(claim.name, request, claim.owner)
        ours, rest = first_value(answer).split(b" ", 1)
        told = self._answered(claim, rest)
        return ours == b"1", told._replace(
            ref=True if isinstance(told, Grant) else (told.ref, heard)
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
            {held[i - 1][1]: reason for i in ints(lost)},
            forgotten=frozenset(waiting[i - 1][0] for i in ints(forgotten)),
        )

    async def release(self, grant: Grant) -> bool:
        claim = grant.claim
        waited = b"t" if grant.ref else b"f"
        parameters = (self.namespace, claim.name.encode(), claim.owner.encode(), waited)
        request = self.statements.release, parameters
        answer = await self._about(claim.name, request, claim.owner)
        if self._until_purge <= 0:
            await self._purge()
        return first_value(answer) == b"t"

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        self._standing.pop(claim.owner, None)
        parameters = (self.namespace, claim.name.encode(), claim.owner.encode())
        request = self.statements.abandon, parameters
        await self._about(claim.name, request, claim.owner, until)
        self.listening.forget_ring(wake(claim.owner).decode())

    async def _purge(self, until: float | None = None) -> None:
        """Also of the counters, which ``transaction_lock`` has beside lease rows."""
        await super()._purge(until)
        parameters = (self.namespace, self._purged_counters_to, b"%d" % (2 * PURGE_EVERY))
        with suppress(BackendUnavailable):
            request = self.statements.purge_counters, parameters
            answer = await self.pool.request(request, until=until)
            self._purged_counters_to = first_value(answer)

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
        answer = await self._about(claim.name, (self.statements.record, parameters))
        return first_value(answer) == b"t"

    async def probe(self) -> list[Finding]:
        return await findings(self.pool.request, self.statements.settings, self.listening.detail)

    def forget(self) -> None:
        self._standing, self._crowded = {}, {}
        self.pool.forget()
        self.listening.forget()

    async def close(self) -> None:
        self.listening.close()
        await self.pool.close()


def _handed(claim: Claim) -> bytes:
    """For how long it can be given its grant with its wake-up."""
    exclusive = claim.mode is Mode.EXCLUSIVE
    return b" %.6f" % min(DIRECT_GRANT_SECONDS, claim.ttl) if exclusive else b""

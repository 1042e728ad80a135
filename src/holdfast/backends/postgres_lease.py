"""PostgreSQL lease rows: every operation is one call of one function on the server.

The functions are in ``postgres_lease_sql``; here are the calls, and the waiting: LISTEN on one
connection per backend, opened by the first wait, where a release rings the one who is next.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Protocol

from psycopg.pq.abc import PGresult

from holdfast.backends.postgres_listen import Listening, make_listening
from holdfast.backends.postgres_look import findings, standing_of
from holdfast.backends.postgres_schema import Schema
from holdfast.claim import Busy, Claim, Grant, Record, Standing
from holdfast.core.admit import check_limit
from holdfast.core.contract import QUEUE_CAP, Finding, Page, Renewal, Runtime, Settings, Waiting
from holdfast.wires.postgres import Dial, Statement, value

__all__ = ["LeaseBackend", "LeaseStatements", "Wire"]

PURGE_EVERY = 1000
"""After so many attempts an equal number of names is looked at and the idle ones dropped."""

_NONE = b""


class Wire(Protocol):
    """What both wires have."""

    async def request(
        self,
        statement: Statement,
        parameters: Sequence[bytes | None],
        owner: str = "",
        until: float | None = None,
    ) -> PGresult: ...

    def forget(self) -> None: ...

    async def close(self) -> None: ...


class LeaseStatements:
    """The requests, as they read in one schema."""

    def __init__(self, schema: Schema) -> None:
        say = schema.statement
        places = ", ".join(f"${number}" for number in range(1, 12))
        self.attempt = say("attempt", f"SELECT @attempt({places})")
        self.exchange = say("exchange", f"SELECT @exchange({places})")
        self.release = say("release", "SELECT @release($1, $2, $3)")
        self.abandon = say("abandon", "SELECT @abandon($1, $2, $3)")
        self.renew = say("renew", "SELECT @renew($1, $2, $3)")
        self.revoke = say("revoke", "SELECT @revoke($1, $2)")
        self.record = say("record", "SELECT @record($1, $2, $3, $4, $5, $6)")
        self.recall = say("recall", _RECALL)
        self.look = say("look", _LOOK + " WHERE l.namespace = $1 AND l.name = $2")
        self.survey = say("survey", _LOOK + _PAGE)
        self.purge = say("purge", "SELECT @purge($1, $2, $3)")
        self.prepared = (self.attempt, self.exchange, self.release, self.abandon, self.renew)


class LeaseBackend:
    """Admits claims in the rows of one namespace."""

    def __init__(
        self,
        runtime: Runtime,
        wire: Wire,
        listen: Dial,
        statements: LeaseStatements,
        settings: Settings,
        display: str,
    ) -> None:
        self.runtime, self.wire, self.display = runtime, wire, display
        self.statements = statements
        self.namespace = settings.namespace.encode()
        channel = f"holdfast_{secrets.token_hex(8)}"
        self.channel = channel.encode()
        self.listening: Listening = make_listening(runtime, listen, channel)
        self._until_purge = PURGE_EVERY
        self._purged_to = ""

    async def attempt(self, claim: Claim, *, join: bool) -> Grant | Busy:
        parameters = (*self._asked(claim), b"t" if join else b"f")
        answer = await self.wire.request(self.statements.attempt, parameters, claim.owner)
        self._until_purge -= 1
        return self._answered(claim, value(answer))

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
            _ring(claim.owner),
        )

    def _answered(self, claim: Claim, answer: bytes) -> Grant | Busy:
        kind, number, rest = (
            answer.split(b" ", 2) if answer[:1] in b"GB" else (*answer.split(), b"")
        )
        if kind == b"G":
            slots = tuple(map(int, rest.split(b","))) if rest else ()
            return Grant(claim, int(number), slots)
        if kind == b"B":
            return Busy(int(number), max(0.0, float(rest)) if rest else None)
        if kind == b"F":
            return Busy(int(number), 1.0, reason=f"{QUEUE_CAP} already wait for {claim.name!r}")
        capacity = int(number)
        check_limit(claim, capacity, slots=capacity > 0, store=self.display)
        raise AssertionError(f"{self.display} disagrees about a limit of {capacity}")

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        await self.listening.wait(_ring(claim.owner).decode(), until)

    def nudge(self, claim: Claim) -> None:
        self.listening.ring(_ring(claim.owner).decode())

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        if grant.claim.name != claim.name:
            return await self.release(grant), await self.attempt(claim, join=True)
        namespace, name, *asked = self._asked(claim)
        parameters = (namespace, name, grant.claim.owner.encode(), *asked)
        answer = await self.wire.request(self.statements.exchange, parameters, claim.owner)
        ours, rest = value(answer).split(b" ", 1)
        return ours == b"1", self._answered(claim, rest)

    async def renew(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], *, until: float
    ) -> Renewal:
        held = [(g.claim.name, g.claim.owner, g.claim.ttl) for g in grants]
        waiting = [(claim.owner, behind) for claim, behind in waits]
        parameters = (self.namespace, json.dumps(held).encode(), json.dumps(waiting).encode())
        answer = await self.wire.request(self.statements.renew, parameters, until=until)
        lost, forgotten = value(answer).split(b";")
        await self._purge_now_and_then(until)
        return Renewal(
            {
                held[i - 1][1]: "it ran out or was broken, and is no longer stored"
                for i in _ints(lost)
            },
            forgotten=frozenset(waiting[i - 1][0] for i in _ints(forgotten)),
        )

    async def release(self, grant: Grant) -> bool:
        claim = grant.claim
        parameters = (self.namespace, claim.name.encode(), claim.owner.encode())
        answer = await self.wire.request(self.statements.release, parameters, claim.owner)
        if self._until_purge <= 0:
            await self._purge_now_and_then(None)
        return value(answer) == b"t"

    async def _purge_now_and_then(self, until: float | None) -> None:
        if self._until_purge > 0:
            return
        self._until_purge = PURGE_EVERY
        parameters = (self.namespace, self._purged_to.encode(), b"%d" % (2 * PURGE_EVERY))
        answer = await self.wire.request(self.statements.purge, parameters, until=until)
        self._purged_to = value(answer).decode()

    async def abandon(self, claim: Claim) -> None:
        parameters = (self.namespace, claim.name.encode(), claim.owner.encode())
        await self.wire.request(self.statements.abandon, parameters, claim.owner)
        self.listening.forget_ring(_ring(claim.owner).decode())

    async def revoke(self, name: str) -> list[int]:
        answer = await self.wire.request(self.statements.revoke, (self.namespace, name.encode()))
        return _ints(value(answer))

    async def look(self, name: str) -> Standing:
        answer = await self.wire.request(self.statements.look, (self.namespace, name.encode()))
        return standing_of(answer, 0) if answer.ntuples else Standing(name, 0, (), ())

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        after = (cursor or "").encode()
        parameters = (self.namespace, prefix.encode(), after, b"%d" % limit)
        answer = await self.wire.request(self.statements.survey, parameters)
        standings = [standing_of(answer, row) for row in range(answer.ntuples)]
        used = [standing for standing in standings if standing.holders or standing.waiters]
        return Page(used, standings[-1].name if len(standings) == limit else None)

    async def record(self, grant: Grant, value_: str, keep_seconds: float) -> bool:
        claim = grant.claim
        parameters = (
            self.namespace,
            claim.name.encode(),
            claim.owner.encode(),
            value_.encode(),
            b"%d" % grant.token,
            b"%.6f" % min(keep_seconds, 3e9),
        )
        answer = await self.wire.request(self.statements.record, parameters)
        return value(answer) == b"t"

    async def recall(self, name: str) -> Record | None:
        answer = await self.wire.request(self.statements.recall, (self.namespace, name.encode()))
        if not answer.ntuples:
            return None
        text, token, age = (answer.get_value(0, column) or _NONE for column in range(3))
        return Record(text.decode(), int(token), float(age))

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(0.5, 1.0))
        await self.runtime.sleep(max(0.0, pause))

    async def probe(self) -> list[Finding]:
        return await findings(self.wire.request, self.listening.detail)

    def forget(self) -> None:
        self.wire.forget()
        self.listening.forget()

    async def close(self) -> None:
        self.listening.close()
        await self.wire.close()


def _ring(owner: str) -> bytes:
    """What a waiter is rung by: anybody may listen, so not the owner itself."""
    return hashlib.blake2b(owner.encode(), digest_size=8).hexdigest().encode()


def _ints(text: bytes) -> list[int]:
    return [int(number) for number in text.split(b",")] if text else []


_LOOK = """
SELECT l.name, l.capacity,
  (SELECT json_agg(json_build_array(o.label, o.mode, o.token, o.slots,
      extract(epoch FROM o.since), extract(epoch FROM o.ends - clock_timestamp())))
    FROM unnest(l.holders) o WHERE o.ends > clock_timestamp()),
  (SELECT json_agg(json_build_array(q.label, q.mode, extract(epoch FROM q.since), q.behind)
      ORDER BY q.place)
    FROM @waiter q WHERE l.crowded AND q.namespace = l.namespace AND q.name = l.name
      AND (q.reserved IS NULL OR q.reserved >= clock_timestamp())
      AND q.refreshed >= clock_timestamp() - interval '%stale% s')
FROM @lock l"""

_PAGE = """
WHERE l.namespace = $1 AND l.name >= $2 AND l.name > $3
  AND l.name <= $2 || repeat(chr(1114111), 4) AND starts_with(l.name, $2)
ORDER BY l.name LIMIT $4"""

_RECALL = """
SELECT r.value, r.token, extract(epoch FROM clock_timestamp() - r.written)
FROM @record r WHERE r.namespace = $1 AND r.name = $2 AND r.expires > clock_timestamp()"""

"""What both modes of the PostgreSQL store do alike: looking, records, purging."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from psycopg.pq.abc import PGresult

from holdfast.claim import Busy, Claim, Grant, LockInfo, Record
from holdfast.core.admit import check_limit
from holdfast.core.contract import QUEUE_CAP, Page, Runtime
from holdfast.errors import BackendUnavailable, HoldfastError, LimitMismatch
from holdfast.stores._sql.connection import SqlPool
from holdfast.stores.postgres.connection import PostgresRefused, first_value
from holdfast.stores.postgres.inspect import (
    damaged,
    finite,
    standing_of,
    standing_or_notice,
    whole,
)
from holdfast.stores.postgres.schema import Schema
from holdfast.stores.postgres.statement import Request

__all__ = ["PURGE_EVERY", "PostgresPool", "SharedBackend", "SharedStatements", "ints", "wake"]

PURGE_EVERY = 1000
"""After so many attempts twice that number of names is looked at, and the idle ones dropped."""

PostgresPool = SqlPool[Request, PGresult]


class SharedStatements:
    """Requests of both modes: each calls one function of the schema and names nothing else, for it
    may run in a pooler's session, where a search_path that others can write to is in force."""

    def __init__(self, schema: Schema, look: str, survey: str, revoke: str, purge: str) -> None:
        say = schema.statement
        self.look = say("look", f"SELECT * FROM @{look}($1, $2)")  # noqa: S608
        self.survey = say("survey", f"SELECT * FROM @{survey}($1, $2, $3, $4)")  # noqa: S608
        self.revoke = say("revoke", f"SELECT @{revoke}($1, $2)")
        self.purge = say("purge", f"SELECT @{purge}($1, $2, $3)")
        self.recall = say("recall", "SELECT * FROM @recall($1, $2)")
        self.settings = say("settings", "SELECT @settings()")


class SharedBackend:
    """The part of a backend that asks for no session of its own."""

    def __init__(
        self,
        runtime: Runtime,
        pool: PostgresPool,
        shared: SharedStatements,
        namespace: str,
        display: str,
    ) -> None:
        self.runtime, self.pool, self.display = runtime, pool, display
        self.namespace = namespace.encode()
        self._shared = shared
        self._until_purge = PURGE_EVERY
        self._purged_to = b""

    def _answered(self, claim: Claim, answer: bytes) -> Grant | Busy:
        """Reads 'G token slots', 'B place seconds last-token', 'F place' or 'M capacity'."""
        try:
            return self._read(claim, answer)
        except LimitMismatch:
            raise
        except ValueError as error:
            raise damaged(claim.name, self.display, error) from None

    def _read(self, claim: Claim, answer: bytes) -> Grant | Busy:
        if answer == b"D":
            raise ValueError("a holder in its row is damaged")
        kind, number, rest, *last = answer.split(b" ")
        if kind == b"G":
            return Grant(claim, int(number), tuple(ints(rest)) if rest else ())
        if kind == b"B":
            seconds = max(0.0, float(rest)) if rest else None
            return Busy(int(number), seconds, int(last[0]) if last else None)
        if kind == b"F":
            return Busy(int(number), 1.0, reason=f"{QUEUE_CAP} already wait for {claim.name!r}")
        capacity = int(number)
        check_limit(claim, capacity, slots=capacity > 0, store=self.display)
        raise ValueError(f"its limit is {capacity}")

    async def _about(
        self, name: str, request: Request, owner: str = "", until: float | None = None
    ) -> PGresult:
        """Asks for something that depends on what is stored about one name. The server refuses
        values that no version has written (a data exception, class 22): told as ``Incompatible``,
        since asking again would not help."""
        try:
            return await self.pool.request(request, owner, until)
        except PostgresRefused as error:
            raise self._refused(name, error) from None

    def _refused(self, name: str, error: PostgresRefused) -> HoldfastError:
        return damaged(name, self.display, error) if error.sqlstate[:2] == "22" else error

    async def _purge(self, until: float | None = None) -> None:
        """A bounded step through the names, now and then; what fails is done another time."""
        self._until_purge = PURGE_EVERY
        parameters = (self.namespace, self._purged_to, b"%d" % (2 * PURGE_EVERY))
        with suppress(BackendUnavailable):
            answer = await self.pool.request((self._shared.purge, parameters), until=until)
            self._purged_to = first_value(answer)

    async def revoke(self, name: str) -> list[int]:
        answer = await self._about(name, (self._shared.revoke, (self.namespace, name.encode())))
        return ints(first_value(answer))

    async def look(self, name: str) -> LockInfo:
        answer = await self._about(name, (self._shared.look, (self.namespace, name.encode())))
        try:
            return standing_of(answer, 0) if answer.ntuples else LockInfo(name, 0, (), ())
        except ValueError as error:
            raise damaged(name, self.display, error) from None

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        after = (cursor or "").encode()
        parameters = (self.namespace, prefix.encode(), after, b"%d" % limit)
        answer = await self.pool.request((self._shared.survey, parameters))
        standings = [standing_or_notice(answer, row) for row in range(answer.ntuples)]
        used = [each for each in standings if each.holders or each.waiters or each.notice]
        return Page(used, standings[-1].name if len(standings) == limit else None)

    async def recall(self, name: str) -> Record | None:
        answer = await self._about(name, (self._shared.recall, (self.namespace, name.encode())))
        if not answer.ntuples:
            return None
        text, token, age = (answer.get_value(0, column) or b"" for column in range(3))
        try:
            return Record(text.decode(), whole(int(token)), finite(float(age)))
        except ValueError as error:
            raise damaged(name, self.display, error) from None

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(0.5, 1.0))
        await self.runtime.sleep(max(0.0, pause))


def wake(owner: str) -> bytes:
    """What a waiter is woken by: anybody may listen, so not the owner itself."""
    return hashlib.blake2b(owner.encode(), digest_size=8).hexdigest().encode()


def ints(text: bytes) -> list[int]:
    """Numbers with commas between them."""
    return [int(number) for number in text.split(b",")] if text else []

"""Slots of a name, as named locks: whoever has the turn looks, takes what is free, and counts.

Everybody takes the turn first, so claims of several slots never have some of them each, and
nobody overtakes the first in line, who keeps the turn while it naps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from holdfast.claim import Busy, Claim, Grant
from holdfast.core.admit import check_limit
from holdfast.errors import Unsupported
from holdfast.stores.mysql.connection import Session, mark_of
from holdfast.stores.mysql.protocol import Result
from holdfast.stores.mysql_advisory.sql import AdvisoryStatements, hold_mark

__all__ = ["Slots"]

MOST_SLOTS = 1024
RECHECK_SECONDS = 1.0
"""How often the first of those who wait for slots looks: a killed holder stirs nobody."""

Ask = Callable[[Session, bytes], Awaitable[list[Result]]]


class Slots:
    """How a session takes slots."""

    def __init__(self, ask: Ask, statements: AdvisoryStatements, display: str) -> None:
        self._ask, self._statements, self._display = ask, statements, display

    async def take(
        self, session: Session, claim: Claim, *, join: bool, queued: bool
    ) -> Grant | Busy:
        """Takes the slots or keeps the turn, if it may wait; else leaves no trace."""
        if claim.limit > MOST_SLOTS:
            raise Unsupported(f"{self._display} has at most {MOST_SLOTS} slots in advisory mode")
        turn = self._statements.lock(claim.name, ":t")
        has_turn, was, free = await self._look(session, claim, turn, queued)
        if was is not None and was != claim.limit:
            await self._rebind(session, claim, was, turn if has_turn else b"")
        if not has_turn:
            return Busy(0)
        if claim.weight > len(free):
            session.at_head = join or queued
            if not session.at_head:
                await self._ask(session, b"DO RELEASE_LOCK(%s)" % turn)
            return Busy(0, RECHECK_SECONDS)
        return await self._count(session, claim, tuple(free[: claim.weight]), turn)

    async def _look(
        self, session: Session, claim: Claim, turn: bytes, queued: bool
    ) -> tuple[bool, int | None, list[int]]:
        """Whether the turn is ours, what the name counts as, and which slots are free."""
        slots = self._statements.slots(claim.name, range(claim.limit))
        # A nap that was killed may have ended before it gave back the lock it is found by.
        nap = self._statements.lock(claim.name, ":n")
        ask = b"SELECT 1, RELEASE_LOCK(%s)" % nap if queued else b"SELECT GET_LOCK(%s, 0)" % turn
        look = b"SELECT " + b", ".join(b"IS_FREE_LOCK(%s)" % lock for lock in slots)
        capacity = self._statements.capacity(claim.name)
        got, counts, flags = await self._series(session, [ask, capacity, look])
        was = int(counts.rows[0][0] or 0) if counts.rows else None
        free = [slot for slot, flag in enumerate(flags.rows[0]) if flag == b"1"]
        return got.rows[0][0] == b"1", was, free

    async def _rebind(self, session: Session, claim: Claim, was: int, turn: bytes) -> None:
        """Makes the name what the claim says, if nobody uses it; raises ``LimitMismatch``."""
        if turn:
            (changed,) = await self._ask(session, self._statements.rebind(claim, was))
            if changed.affected:
                return
            await self._ask(session, b"DO RELEASE_LOCK(%s)" % turn)
        check_limit(claim, was, slots=was > 0, store=self._display)

    async def _count(
        self, session: Session, claim: Claim, slots: tuple[int, ...], turn: bytes
    ) -> Grant | Busy:
        locks = [*self._statements.slots(claim.name, slots), hold_mark(mark_of(session))]
        taking = b"SELECT " + b", ".join(b"GET_LOCK(%s, 0)" % lock for lock in locks)
        counting = self._statements.count_slots(claim, slots, mark_of(session))
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
        results = await self._ask(session, b"; ".join(statements))
        if len(results) < len(statements):
            session.connection.close()
            raise session.connection.broken("its request was interrupted")
        return results

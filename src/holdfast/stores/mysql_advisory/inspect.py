"""What people and the other half of the client are told about named locks."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.claim import Holder, LockInfo, Mode, Record, Waiter, read_label
from holdfast.core.contract import Finding, Page, Runtime
from holdfast.io.clock import now
from holdfast.stores.mysql.connection import checked
from holdfast.stores.mysql.inspect import findings
from holdfast.stores.mysql.protocol import Result, Row
from holdfast.stores.mysql.row import MICROS, read_record
from holdfast.stores.mysql.row_cas import Wire
from holdfast.stores.mysql_advisory.sql import AdvisoryStatements, hold_mark

__all__ = ["AdvisoryView", "Wire"]

PURGE_EVERY = 1000
ENDING_SECONDS = 2.0
"""How long ``revoke`` waits for the server to have ended a session."""


class AdvisoryView:
    """The part of a backend that asks for no session of its own."""

    def __init__(
        self, runtime: Runtime, wire: Wire, statements: AdvisoryStatements, display: str
    ) -> None:
        self.runtime, self.wire, self.statements, self.display = runtime, wire, statements, display
        self._until_purge = PURGE_EVERY

    async def _request(self, sql: bytes, until: float | None = None) -> list[Result]:
        return checked(await self.wire.request(sql, until=until), self.display)

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
        waiters = [_waiter((row[0] or b"").decode(errors="replace")) for row in waiting.rows]
        holders, limit = _holders(held.rows)
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
            for found in [_holders(rows)]
        ]
        return Page(standings, names[-1] if len(names) == limit else None)

    async def recall(self, name: str) -> Record | None:
        (kept,) = await self._request(self.statements.recall(name))
        for row in kept.rows:
            return read_record(row, name, self.display)
        return None

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(0.5, 1.0))
        await self.runtime.sleep(max(0.0, pause))

    async def findings(self) -> list[Finding]:
        return await findings(self._request)

    async def _purge(self, until: float | None = None) -> None:
        """A bounded step, now and then."""
        if self._until_purge <= 0:
            self._until_purge = PURGE_EVERY
            await self._request(self.statements.purge(), until=until)
            await self.wire.request(self.statements.purge_transactions(), until=until)


def _holders(rows: Sequence[Row]) -> tuple[tuple[Holder, ...], int]:
    """Rows as ``look`` has them; slots of one hold together."""
    holders: dict[int, Holder] = {}
    limit = 0
    for row in rows:
        slot, capacity, token, since, ttl = (int(row[place] or 0) for place in (1, 2, 3, 5, 6))
        limit = capacity
        slots = holders[token].slots if token in holders else ()
        slots += (slot,) if slot >= 0 else ()
        mode = Mode.SLOTS if slots else Mode.EXCLUSIVE
        who = read_label((row[4] or b"").decode(errors="replace"))
        holders[token] = Holder(*who, mode, token, slots, since / MICROS, ttl / MICROS)
    return tuple(holders.values()), limit


def _waiter(request: str) -> Waiter | None:
    """Who a waiting request says it is for."""
    lock, _, said = request.partition("/*hf ")
    try:
        label, since = said.partition("*/")[0].split(" ")
        text = bytes.fromhex(label.replace("-", "")).decode()
        mode = Mode.SLOTS if ":t'" in lock else Mode.EXCLUSIVE
        return Waiter(*read_label(text), mode, int(since) / MICROS, 0)
    except ValueError:
        return None

"""How a row of the lock table is changed: read, decided on, written if nobody was faster.

Two requests, and no row stays locked while a client thinks, or hangs. Whoever is to be called is
marked in the row, and its subscription is stirred by the same request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.stores._sql.connection import SqlPool
from holdfast.stores.mysql.connection import checked
from holdfast.stores.mysql.protocol import Reply, Result
from holdfast.stores.mysql.row import State, empty_state, read_state
from holdfast.stores.mysql.sql import IF_WRITTEN, LeaseStatements, subscription_lock
from holdfast.stores.mysql.wakeups import Hanger, Listening

__all__ = ["REMEMBERED", "UNREADABLE", "Rows", "Wire"]

T = TypeVar("T")
CHANGES = 100
"""So often a row may be changed by others while we decide."""
REMEMBERED = 4096
CLASHES = frozenset({1020, 1205, 1213})
"""The server gave way to another transaction; nothing was changed."""
UNREADABLE = frozenset({1264, 1292, 1366, 1690, 1916})
"""What is stored is not what a statement can count with; nothing was changed. The row tells."""


Wire = SqlPool[bytes, Reply]


class Rows:
    """The part of a backend that changes rows."""

    def __init__(
        self, runtime: Runtime, wire: Wire, hanger: Hanger, listening: Listening,
        statements: LeaseStatements, display: str,
    ) -> None:  # fmt: skip
        self.runtime, self.wire, self.statements, self.display = runtime, wire, statements, display
        self.listening, self._hanger = listening, hanger
        self._crowded: dict[str, None] = {}
        """Names that were not alone when last seen: asking for them as free is in vain."""

    async def _ask(self, sql: bytes, owner: str = "", until: float | None = None) -> list[Result]:
        """One request; again where the server gave way to another."""
        reply = await self.wire.request(sql, owner, until)
        for clash in range(CHANGES):
            if reply.failure is None or reply.failure.code not in CLASHES:
                break
            await self._step_back(clash)
            reply = await self.wire.request(sql, owner, until)
        return checked(reply, self.display)

    async def _step_back(self, times: int) -> bool:
        """Leaves the row to others for a moment, the longer the more often they were faster, so
        that a crowd of any size spreads out; whether it did. Four lose ten races in a row now and
        then, fifty often do: what doubles each time would keep the four waiting for nothing."""
        if times <= 2:
            return False
        await self.runtime.sleep(self.runtime.between(0.0, min(0.25, 0.0005 * times**2)))
        return True

    async def _change(
        self,
        name: str,
        decide: Callable[[State], T],
        owner: str = "",
        until: float | None = None,
        then: bytes = b"",
        state: State | None = None,
    ) -> T:
        """Reads the row, decides, and writes what has changed; again if others were faster."""
        state = await self._read(name, owner, until) if state is None else state
        for times in range(CHANGES):
            answer = decide(state)
            state.settle(owner)
            if not state.changed and not then:
                return answer
            fresh = await self._write(state, owner, until, then)
            if fresh is None:
                return answer
            state = fresh
            if await self._step_back(times):  # what was fresh before that is old by now
                state = await self._read(name, owner, until)
        raise BackendUnavailable(f"{self.display}: {name!r} keeps changing while it is asked for")

    async def _read(self, name: str, owner: str = "", until: float | None = None) -> State:
        (row,) = (await self._ask(self.statements.read(name), owner, until))[0].rows
        return self._state(name, row)

    def _state(self, name: str, row: tuple[bytes | None, ...]) -> State:
        if row[1] is None:
            return empty_state(name, int(row[0] or 0), self.display)
        return read_state(row, name, self.display)

    async def _write(
        self, state: State, owner: str, until: float | None, then: bytes
    ) -> State | None:
        """Writes a state; answers a newer one instead if there is one."""
        mine = [wake for wake in state.wakes if wake.subscription == self.listening.subscription]
        calls = [wake for wake in state.wakes if wake.subscription != self.listening.subscription]
        batch = [self.statements.write(state)]
        if then:
            batch = [b"BEGIN", *batch, IF_WRITTEN, then, b"COMMIT"]
        batch.append(self.statements.read(state.name))
        subscriptions = list(dict.fromkeys(wake.subscription for wake in calls))
        results = await self._send(batch, subscriptions, owner, until)
        if not results[1 if then else 0].affected:
            return self._state(state.name, results[len(batch) - 1].rows[0])
        self._note(state)
        for wake in mine:
            self.listening.wake(wake.owner)
        if results[len(batch) :]:
            await self._finish_calls(state.name, subscriptions, results[len(batch)], until)
        return None

    async def _send(
        self, batch: list[bytes], subscriptions: list[str], owner: str, until: float | None
    ) -> list[Result]:
        """One request. The calls come last in it: one that fails says that nobody is there."""
        least = len(batch)
        if subscriptions and not self._hanger.looks:
            found = b", ".join(
                b"IS_USED_LOCK(%s)" % subscription_lock(subscription)
                for subscription in subscriptions
            )
            batch = [*batch, b"SELECT " + found, _stir(subscriptions[0])]
        return await self._request(b"; ".join(batch), least, owner, until)

    async def _request(
        self, sql: bytes, least: int, owner: str = "", until: float | None = None
    ) -> list[Result]:
        """One request, of which what comes behind ``least`` results may fail."""
        reply = await self.wire.request(sql, owner, until)
        for clash in range(CHANGES):
            if len(reply.results) > least:
                return reply.results
            if reply.failure is None or reply.failure.code not in CLASHES:
                break
            await self._step_back(clash)
            reply = await self.wire.request(sql, owner, until)
        return checked(reply, self.display)

    def _note(self, state: State) -> None:
        if state.crowd:
            self._crowd(state.name)
        else:
            self._crowded.pop(state.name, None)

    def _crowd(self, name: str) -> None:
        self._crowded[name] = None
        if len(self._crowded) > REMEMBERED:
            self._crowded.pop(next(iter(self._crowded)), None)

    async def _finish_calls(
        self, name: str, subscriptions: list[str], found: Result, until: float | None
    ) -> None:
        """Stirs the other subscriptions, and skips those whose sessions have ended."""
        gone = {
            subscription
            for subscription, number in zip(subscriptions, found.rows[0], strict=True)
            if number is None
        }
        for subscription in subscriptions[1:]:
            if subscription not in gone:
                await self.wire.request(_stir(subscription), until=until)
        if gone:
            await self._change(name, lambda state: state.skip(gone), until=until)


def _stir(subscription: str) -> bytes:
    return b"KILL QUERY IS_USED_LOCK(%s)" % subscription_lock(subscription)

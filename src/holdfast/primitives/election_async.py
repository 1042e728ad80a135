"""Leader election for the asyncio client: the twin of ``primitives.election.Election``."""

from __future__ import annotations

from collections.abc import AsyncIterator

from holdfast.claim import Holder
from holdfast.durations import Duration, timeout_seconds
from holdfast.primitives.election import NOT_SEEN, ElectionBase
from holdfast.primitives.lock_async import AsyncLock

__all__ = ["AsyncElection"]


class AsyncElection(ElectionBase[AsyncLock]):
    """An election of the asyncio client."""

    _lock = AsyncLock

    async def leader(self) -> Holder | None:
        """The leader at this moment, or ``None``."""
        return await self._leader()

    def observe(self, timeout: Duration | None = None) -> AsyncIterator[Holder | None]:
        """Yields the leader, then each new leader; ``None`` while there is none.

        With a timeout the iteration ends when the leader did not change for so long.
        """
        return self._observe(timeout_seconds(timeout))

    async def _observe(self, seconds: float | None) -> AsyncIterator[Holder | None]:
        seen: object = NOT_SEEN
        while True:
            until = None if seconds is None else self._engine.runtime.now() + seconds
            try:
                leader = await self._next(seen, until)
            except TimeoutError:
                return
            yield leader
            seen = leader.token if leader else None

    async def resign(self) -> None:
        """Ends the leadership that this client won. Its block goes on, without the lock."""
        await self._resign()

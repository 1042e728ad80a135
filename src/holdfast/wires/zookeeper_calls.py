"""Who waits for the answers of ZooKeeper: a thread, or a task."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Protocol

__all__ = ["AsyncCall", "BlockingCall", "Call"]


class Call(Protocol):
    """One who waits for the last answer of a pipeline."""

    blocking: bool
    """Whether the thread that waits can read meanwhile."""

    def done(self) -> None:
        """From whichever thread reads; it may come again."""
        ...

    def answered(self) -> bool: ...

    async def wait(self, seconds: float) -> bool: ...


class BlockingCall:
    """A thread that waits."""

    __slots__ = ("_done", "_lock")

    blocking = True

    def __init__(self) -> None:
        self._done = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def done(self) -> None:
        self._done = True
        with suppress(RuntimeError):  # it was told before
            self._lock.release()

    def answered(self) -> bool:
        return self._done

    async def wait(self, seconds: float) -> bool:
        return self._done or self._lock.acquire(timeout=max(0.0, seconds))


class AsyncCall:
    """A task that waits."""

    __slots__ = ("_future", "_loop")

    blocking = False

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] = self._loop.create_future()

    def done(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finish, True)

    def answered(self) -> bool:
        return self._future.done()

    def _finish(self, answered: bool) -> None:
        if not self._future.done():
            self._future.set_result(answered)

    async def wait(self, seconds: float) -> bool:
        timer = self._loop.call_later(max(0.0, seconds), self._finish, False)
        try:
            return await self._future
        finally:
            timer.cancel()

"""Who waits for the answers of ZooKeeper: a thread, or a task."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Protocol

__all__ = ["AsyncCall", "BlockingCall", "Call"]


class Call(Protocol):
    """One who waits for the last answer of a pipeline."""

    def done(self) -> None:
        """From the connection's thread."""
        ...

    async def wait(self, seconds: float) -> bool: ...


class BlockingCall:
    """A thread that waits."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def done(self) -> None:
        self._lock.release()

    async def wait(self, seconds: float) -> bool:
        return self._lock.acquire(timeout=max(0.0, seconds))


class AsyncCall:
    """A task that waits."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] = self._loop.create_future()

    def done(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finish, True)

    def _finish(self, answered: bool) -> None:
        if not self._future.done():
            self._future.set_result(answered)

    async def wait(self, seconds: float) -> bool:
        timer = self._loop.call_later(max(0.0, seconds), self._finish, False)
        try:
            return await self._future
        finally:
            timer.cancel()

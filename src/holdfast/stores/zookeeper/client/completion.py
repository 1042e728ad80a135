"""Who waits for the answers of ZooKeeper: a thread, or a task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

__all__ = ["AsyncCompletion", "BlockingCompletion", "Completion", "CompletionReader", "WakeSignal"]

LONGEST_WAIT_SECONDS = 3600.0


class CompletionReader(Protocol):
    """Where threads wait: one of them may read for all."""

    def wait(self, completion: BlockingCompletion, seconds: float) -> bool: ...


class Completion(Protocol):
    """One who waits for the last answer of a pipeline."""

    def done(self) -> None:
        """From whichever thread has read the answer."""
        ...

    async def wait(self, seconds: float, reader: CompletionReader) -> bool: ...


class WakeSignal(Protocol):
    """What ends a wait for word of an event, from any thread."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...


class BlockingCompletion:
    """A thread that waits, for an answer or for word of an event. Used once."""

    __slots__ = ("_lock", "answered", "interrupt")

    def __init__(self) -> None:
        self._lock: threading.Lock | None = None
        self.answered = False
        self.interrupt: Callable[[], None] | None = None
        """What ends its wait at the socket, while it may be there."""

    def done(self) -> None:
        self.answered = True
        interrupt, lock = self.interrupt, self._lock
        if interrupt is not None:
            interrupt()
        if lock is not None:
            with suppress(RuntimeError):  # it was told already
                lock.release()

    set = done

    def is_set(self) -> bool:
        return self.answered

    def wait_for_reader(self, seconds: float) -> bool:
        """Leaves the reading to others."""
        lock = threading.Lock()
        lock.acquire()
        self._lock = lock  # before the look: who answers from here on releases it
        if not self.answered:
            lock.acquire(timeout=max(0.0, min(seconds, LONGEST_WAIT_SECONDS)))
        return self.answered

    async def wait(self, seconds: float, reader: CompletionReader) -> bool:
        return reader.wait(self, seconds)


class AsyncCompletion:
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

    async def wait(self, seconds: float, reader: CompletionReader) -> bool:
        timer = self._loop.call_later(max(0.0, seconds), self._finish, False)
        try:
            return await self._future
        finally:
            timer.cancel()

"""How a thread or a task waits for the last reply of a pipeline, or for an event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

__all__ = ["AsyncCompletion", "BlockingCompletion", "Completion", "CompletionReader", "WakeSignal"]

LONGEST_WAIT_SECONDS = 3600.0


class CompletionReader(Protocol):
    """The reader of a connection, which threads wait with: one of them may read for all."""

    def wait(self, completion: BlockingCompletion, seconds: float) -> bool: ...


class Completion(Protocol):
    """A thread or task that waits for the last reply of a pipeline."""

    def done(self) -> None:
        """Called by the thread that has read the reply."""
        ...

    async def wait(self, seconds: float, reader: CompletionReader) -> bool: ...


class WakeSignal(Protocol):
    """Ends a wait for an event, from any thread."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...


class BlockingCompletion:
    """A thread that waits for a reply or for an event. Used once."""

    __slots__ = ("_lock", "answered", "interrupt")

    def __init__(self) -> None:
        self._lock: threading.Lock | None = None
        self.answered = False
        self.interrupt: Callable[[], None] | None = None
        """Interrupts the thread's poll of the socket; set while it may poll."""

    def done(self) -> None:
        self.answered = True
        interrupt, lock = self.interrupt, self._lock
        if interrupt is not None:
            interrupt()
        if lock is not None:
            with suppress(RuntimeError):  # released already
                lock.release()

    set = done

    def is_set(self) -> bool:
        return self.answered

    def wait_for_reader(self, seconds: float) -> bool:
        """Waits while another thread reads. Returns whether the reply is there."""
        lock = threading.Lock()
        lock.acquire()
        self._lock = lock  # before the check: from here on ``done`` releases it
        if not self.answered:
            lock.acquire(timeout=max(0.0, min(seconds, LONGEST_WAIT_SECONDS)))
        return self.answered

    async def wait(self, seconds: float, reader: CompletionReader) -> bool:
        return reader.wait(self, seconds)


class AsyncCompletion:
    """A task that waits for a reply."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] = self._loop.create_future()

    def done(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no task waits
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

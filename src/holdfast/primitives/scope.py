"""The block of a task: cancelled when its lease becomes doubtful, before it runs out."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from holdfast.core.hold import Hold

__all__ = ["BlockScope"]


class BlockScope:
    """Counts cancellations as ``asyncio.timeout`` does, so that others' are never swallowed."""

    __slots__ = ("_cancelling", "_closed", "_fired", "_hold", "_loop", "_task", "reason")

    def __init__(self, hold: Hold) -> None:
        task: asyncio.Task[object] = asyncio.current_task()  # type: ignore[assignment]
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._cancelling = task.cancelling()
        self._fired = False
        self.reason = ""
        """Why the block was stopped."""
        self._closed = False
        self._hold = hold
        if hold.on_doubt is None:  # a re-entered block is stopped by the outer one
            hold.on_doubt = self._stop
        if hold.doubted:
            hold.doubt("it was doubtful from the start")

    def _stop(self, reason: str) -> None:
        """On the watcher's thread, or whichever finds it doubtful or lost; perhaps on two."""
        self.reason = reason
        with suppress(RuntimeError):  # the loop is closed, and the block with it
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not self._closed and not self._fired:
            self._fired = True
            self._task.cancel()

    def close(self, error: BaseException | None) -> bool:
        """Whether the block ends because of us, and of nobody else who cancelled it."""
        self._closed = True
        if self._hold.on_doubt == self._stop:
            self._hold.on_doubt = None
        if not self._fired:
            return False
        ours_alone = self._task.uncancel() <= self._cancelling
        return ours_alone and isinstance(error, asyncio.CancelledError)

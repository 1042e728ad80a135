"""The lock of the asyncio client: the twin of ``primitives.lock.Lock``.

The block of a task is cancelled when its lease becomes doubtful, before the lease runs out.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Never

from holdfast.core.hold import Hold
from holdfast.durations import Duration
from holdfast.lease import AsyncLease
from holdfast.primitives.context import BlockExit
from holdfast.primitives.lock import UNSET, LockBase

__all__ = ["AsyncLock", "BlockScope"]


class BlockScope:
    """Cancels the task of a block when its hold becomes doubtful or lost.

    Counts cancellations as ``asyncio.timeout`` does, so that a cancellation from elsewhere is never
    swallowed.
    """

    __slots__ = ("_cancelling", "_closed", "_fired", "_hold", "_loop", "_task", "reason")

    def __init__(self, hold: Hold) -> None:
        task: asyncio.Task[object] = asyncio.current_task()  # type: ignore[assignment]
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._cancelling = task.cancelling()
        self._fired = False
        self.reason = ""
        """Why the block was cancelled."""
        self._closed = False
        self._hold = hold
        if hold.on_doubtful is None:  # the block of a re-entry is cancelled by the outer block
            hold.on_doubtful = self._stop
        if hold.doubted:
            hold.mark_doubtful("it was doubtful from the start")

    def _stop(self, reason: str) -> None:
        """Runs on the thread that finds the hold doubtful or lost; perhaps on two threads."""
        self.reason = reason
        with suppress(RuntimeError):  # the loop is closed, and the block with it
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not self._closed and not self._fired:
            self._fired = True
            self._task.cancel()

    def close(self, error: BaseException | None) -> bool:
        """Ends the scope. True if the block ends by our cancellation and by no other."""
        self._closed = True
        if self._hold.on_doubtful == self._stop:
            self._hold.on_doubtful = None
        if not self._fired:
            return False
        ours_alone = self._task.uncancel() <= self._cancelling
        return ours_alone and isinstance(error, asyncio.CancelledError)


class AsyncLock(LockBase[AsyncLease]):
    """A lock of the asyncio client. Any number of tasks may use one object at once."""

    __slots__ = ()
    _lease = AsyncLease

    async def acquire(
        self, blocking: bool = True, timeout: Duration | None = UNSET, **others: Never
    ) -> AsyncLease | None:
        """Returns a lease (which is true), or ``None`` if it was not acquired in time."""
        return await self._acquire(blocking, timeout, others)

    async def release(self) -> None:
        """Ends the newest lease that this task acquired through this object; else ``NotHeld``."""
        await self._release()

    async def locked(self) -> bool:
        """Whether an attempt would have to wait at this moment."""
        return await self._locked()

    async def __aenter__(self) -> AsyncLease:
        block = self._entering_block()
        lease = await self._take(self._options.timeout, block=True)
        self._entered(block, lease)
        lease._scope = BlockScope(lease._hold)
        return lease

    async def _exit_block(self, lease: AsyncLease | None, error: BaseException | None) -> None:
        lease = self._exiting_lease(lease)
        if isinstance(error, GeneratorExit):
            lease._drop()  # the loop is gone: nothing can be awaited here
            return
        if lease._scope is not None and lease._scope.close(error):
            # The block ends within its certain time, whatever the store does to the release.
            await self._engine.runtime.finish(lease._release_block(), lease.remaining)
            raise lease._lost_error() from error
        if not await lease._release_block():
            if error is None:
                raise lease._lost_error()
            lease._note_loss(error)

    if TYPE_CHECKING:

        async def __aexit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None: ...
    else:
        __aexit__ = BlockExit()

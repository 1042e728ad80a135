"""The lock of the asyncio client: the twin of ``primitives.lock.Lock``."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from holdfast.durations import Duration
from holdfast.lease import AsyncLease
from holdfast.primitives.block import WayOut
from holdfast.primitives.lock import UNSET, LockBase
from holdfast.primitives.scope import BlockScope

__all__ = ["AsyncLock"]


class AsyncLock(LockBase[AsyncLease]):
    """A lock of the asyncio client. Any number of tasks may use one object at once."""

    __slots__ = ()
    _lease = AsyncLease

    async def acquire(
        self, blocking: bool = True, timeout: Duration | None = UNSET
    ) -> AsyncLease | None:
        """A lease (which is true), or ``None`` if it was not acquired in time."""
        return await self._acquire(blocking, timeout)

    async def release(self) -> None:
        """Ends the newest lease that this task took through this object; else ``NotHeld``."""
        await self._release()

    async def locked(self) -> bool:
        """Whether an attempt would have to wait at this moment."""
        return await self._locked()

    async def __aenter__(self) -> AsyncLease:
        block = self._begin()
        lease = await self._take(self._terms.timeout, block=True)
        self._opened(block, lease)
        lease._scope = BlockScope(lease._hold)
        return lease

    async def _leave(self, lease: AsyncLease | None, error: BaseException | None) -> None:
        lease = self._closing(lease)
        if isinstance(error, GeneratorExit):
            lease._drop()  # its loop is gone: nothing can be awaited here any more
            return
        if lease._scope is not None and lease._scope.close(error):
            # The block ends within its certain time, whatever the store does to the release.
            await self._engine.runtime.finish(lease._release_block(), lease.remaining)
            raise lease._lost_error() from error
        if not await lease._release_block() and error is None:
            raise lease._lost_error() from error

    if TYPE_CHECKING:

        async def __aexit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None: ...
    else:
        __aexit__ = WayOut()

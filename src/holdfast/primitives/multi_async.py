"""Several names at once, for the asyncio client: the twin of ``primitives.multi.MultiLock``."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Never

from holdfast.durations import Duration
from holdfast.multilease import AsyncMultiLease
from holdfast.primitives.context import BlockExit
from holdfast.primitives.lock import UNSET
from holdfast.primitives.lock_async import AsyncLock, BlockScope
from holdfast.primitives.multi import MultiLockBase

__all__ = ["AsyncMultiLock"]


class AsyncMultiLock(MultiLockBase[AsyncMultiLease]):
    """Several names of the asyncio client."""

    _lock = AsyncLock
    _lease = AsyncMultiLease

    async def acquire(
        self, blocking: bool = True, timeout: Duration | None = UNSET, **others: Never
    ) -> AsyncMultiLease | None:
        """Returns all the leases, or ``None`` if they were not acquired in time."""
        return await self._acquire(blocking, timeout, others)

    async def __aenter__(self) -> AsyncMultiLease:
        block = self._entering_block()
        multi = await self._take(self._options.timeout, block=True)
        self._entered(block, multi)
        for lease in multi.leases.values():
            lease._scope = BlockScope(lease._hold)
        return multi

    async def _exit_block(self, lease: AsyncMultiLease | None, error: BaseException | None) -> None:
        multi = self._exiting_lease(lease)
        if isinstance(error, GeneratorExit):
            multi._drop()  # the loop is gone: nothing can be awaited here
            return
        scopes = [lease._scope for lease in multi.leases.values() if lease._scope is not None]
        closed = [scope.close(error) for scope in scopes]
        if True in closed:
            # The block ends within its certain time, whatever the store does to the releases.
            await self._engine.runtime.finish(multi._release_block(), multi.remaining)
            raise multi._lost_error() from error
        if not await multi._release_block():
            if error is None:
                raise multi._lost_error()
            multi._note_loss(error)

    if TYPE_CHECKING:

        async def __aexit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None: ...
    else:
        __aexit__ = BlockExit()

"""Several names at once: in sorted order, all or none within one timeout, lost together."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, TypeVar

from holdfast.claim import Mode, check_name
from holdfast.core.drive import run_now
from holdfast.durations import Duration
from holdfast.errors import LockTimeout
from holdfast.multilease import MultiLease, MultiLeaseBase
from holdfast.primitives.context import BlockExit, LockContext
from holdfast.primitives.lock import UNSET, Lock, LockBase, wait_seconds

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.primitives.options import LockOptions

__all__ = ["MultiLock", "MultiLockBase"]

M = TypeVar("M", bound=MultiLeaseBase[Any])


class MultiLockBase(LockContext[M]):
    """Acquires in one order (sorted by name), so that two multi-locks never wait in a circle."""

    _lock: type[LockBase[Any]]
    _lease: type[M]

    def __init__(self, engine: Engine, names: Iterable[str], options: LockOptions) -> None:
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise TypeError("multi() takes several names; for one name use lock()")
        self.names = tuple(sorted({check_name(name) for name in names}))
        if not self.names:
            raise ValueError("multi() takes at least one name")
        super().__init__(engine)
        self._options = options

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self.names))}>"

    async def _take(self, timeout: float | None, *, block: bool, explain: bool = True) -> M:
        now = self._engine.runtime.now
        until = None if not timeout else now() + timeout
        taken: dict[str, Any] = {}
        try:
            for name in self.names:
                lock = self._lock(self._engine, name, self._options, Mode.EXCLUSIVE)
                left = timeout if until is None else max(0.0, until - now())
                taken[name] = await lock._take(left, block=block, explain=explain)
            multi = self._lease(taken)
            multi.check()  # the first may have been lost while we waited for the last
            return multi
        except BaseException:
            for lease in reversed(list(taken.values())):
                await lease._release()
            raise

    async def _acquire(
        self, blocking: bool, timeout: Duration | None, others: dict[str, Never]
    ) -> M | None:
        limit = wait_seconds(blocking, timeout, self._options.timeout, others)
        try:
            return await self._take(limit, block=False, explain=False)
        except LockTimeout:
            return None


class MultiLock(MultiLockBase[MultiLease]):
    """Several names of the blocking client."""

    _lock = Lock
    _lease = MultiLease

    def acquire(
        self, blocking: bool = True, timeout: Duration | None = UNSET, **others: Never
    ) -> MultiLease | None:
        """Returns all the leases, or ``None`` if they were not acquired in time."""
        return run_now(self._acquire(blocking, timeout, others))

    def __enter__(self) -> MultiLease:
        block = self._entering_block()
        multi = run_now(self._take(self._options.timeout, block=True))
        try:
            self._entered(block, multi)
        except BaseException:
            multi._drop()
            raise
        return multi

    def _exit_block(self, lease: MultiLease | None, error: BaseException | None) -> None:
        multi = self._exiting_lease(lease)
        if not run_now(multi._release_block()):
            if error is None:
                raise multi._lost_error()
            multi._note_loss(error)

    if TYPE_CHECKING:

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None: ...
    else:
        __exit__ = BlockExit()

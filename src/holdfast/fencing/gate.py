"""A gate before work that has no transaction: the resource is held on a shared store meanwhile.

Whoever may pass holds the gate's own lock for the whole block, and the highest fence that passed
is recorded under it. It is a lock like any other: a process that is stopped inside the block for
longer than the ttl can still act afterwards. Where the resource can check for itself, let it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import Any

from holdfast.claim import Fence, FenceKeys, Keys, Mode
from holdfast.core import log
from holdfast.core.contract import Guarantee
from holdfast.core.drive import run_now
from holdfast.durations import Duration
from holdfast.errors import LockLost, Unsupported
from holdfast.fencing.rule import (
    Full,
    as_fence,
    check_resource,
    enter,
    pack,
    refusal,
    stale,
    unpack,
)

__all__ = ["Gate"]

PREFIX = "gate/"
KEEP_SECONDS = 366 * 24 * 3600.0
"""How long a fence is remembered after it was the first to pass with its token."""
MOST_RESOURCES = 100_000


class Gate:
    """Gates on one door, one for each resource.

    >>> import holdfast
    >>> with holdfast.connect("memory://gates") as locks:
    ...     with locks.lock("order:42") as lease, Gate(locks).enter("printer", lease):
    ...         print("alone")
    alone
    """

    def __init__(
        self,
        locks: Any,
        *,
        timeout: Duration | None = 30,
        ttl: Duration | None = None,
        fence_keys: Keys = (),
        limit: int = MOST_RESOURCES,
    ) -> None:
        """``locks`` is a client of a store that all servers of the resource share.

        With ``fence_keys``, or those of the client, what is not a lease must be signed by one.
        Without keys this object records at most ``limit`` resources that were not known before,
        so that invented names can't fill the store; further ones are refused (``Unsupported``),
        those that are known pass as ever.
        """
        if Guarantee.RECORDS not in locks.guarantees:
            raise Unsupported(f"{locks!r} can't keep a gate: it has no RECORDS")
        self._locks = locks
        self.fence_keys = FenceKeys(fence_keys) or locks._door.fence_keys
        self._limit, self._recorded = limit, 0
        self._options: dict[str, Any] = {"timeout": timeout}
        if ttl is not None:
            self._options["ttl"] = ttl

    @property
    def asynchronous(self) -> bool:
        """Whether its blocks are entered with ``async with``."""
        return hasattr(self._locks, "__aenter__")

    def enter(self, resource: str, lease: Any) -> Any:
        """A block for ``with`` (``async with`` on a door of asyncio) that gives the gate's lease.

        Raises ``StaleFence`` if a newer holder has passed, ``LockTimeout`` if somebody else is
        inside for too long. Readers pass together.
        """
        check_resource(resource)
        fence = as_fence(lease, self.fence_keys)
        passing = Passing(self._locks, resource, fence, self._options, self._count)
        return passing.over_async() if self.asynchronous else passing.over()

    def _count(self, resource: str) -> None:
        """Counts a resource that is about to be recorded first; raises ``Full`` past the limit."""
        if self.fence_keys:
            return
        if self._recorded >= self._limit:
            raise Full(
                f"the gate {resource!r} is new, and this Gate has recorded {self._limit} new ones: "
                "it takes in no more, for names in fences that are not signed may be invented; use "
                "fence_keys, or raise limit"
            )
        self._recorded += 1
        if self._recorded == self._limit // 2 + 1:
            log.warning("a Gate has recorded half of its limit of %d resources", self._limit)


class Passing:
    """One fence at one gate."""

    def __init__(
        self,
        locks: Any,
        resource: str,
        fence: Fence,
        options: dict[str, Any],
        count: Callable[[str], None],
    ) -> None:
        self._locks, self._resource, self._fence = locks, resource, fence
        self._count = count
        self._name, self._options = PREFIX + resource, options
        shared = Guarantee.SHARED in locks.guarantees
        self._reads = fence.mode is Mode.SHARED and shared

    def _gate(self, *, read: bool = False) -> Any:
        if not read:
            return self._locks.lock(self._name, **self._options)
        return self._locks.rwlock(self._name, **self._options).read()

    def over(self) -> AbstractContextManager[Any]:
        return self._read() if self._reads else self._write()

    def over_async(self) -> AbstractAsyncContextManager[Any]:
        return self._read_async() if self._reads else self._write_async()

    @contextmanager
    def _write(self) -> Iterator[Any]:
        with self._gate() as lease:
            run_now(self._admit(lease))
            yield lease

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """A reader's first entry is recorded, alone; it then passes beside other readers."""
        with self._gate(read=True) as lease:
            if run_now(self._known()):
                yield lease
                return
        with self._write():
            pass
        with self._gate(read=True) as lease:
            run_now(self._known())
            yield lease

    @asynccontextmanager
    async def _write_async(self) -> AsyncIterator[Any]:
        async with self._gate() as lease:
            await self._admit(lease)
            yield lease

    @asynccontextmanager
    async def _read_async(self) -> AsyncIterator[Any]:
        async with self._gate(read=True) as lease:
            if await self._known():
                yield lease
                return
        async with self._write_async():
            pass
        async with self._gate(read=True) as lease:
            await self._known()
            yield lease

    async def _judge(self) -> tuple[Any, Any]:
        """What is remembered, and what would be; raises ``StaleFence``."""
        record = await self._locks._door.backend.recall(self._name)
        memory = None if record is None else unpack(record.value, f"the gate {self._resource!r}")
        against = refusal(memory, self._fence)
        if against is not None:
            raise stale(self._resource, self._fence, against)
        return memory, enter(memory, self._fence)

    async def _known(self) -> bool:
        memory, entered = await self._judge()
        return entered is memory

    async def _admit(self, lease: Any) -> None:
        memory, entered = await self._judge()
        if entered is memory:
            return
        if memory is None:
            self._count(self._resource)
        grant = lease._hold.grant
        if not await self._locks._door.backend.record(grant, pack(entered), KEEP_SECONDS):
            reason = lease.reason or "the store had it no longer"
            message = f"the gate {self._resource!r} was lost before it was passed: {reason}"
            raise LockLost(message, name=self._name, reason=reason)

"""A gate before work that has no transaction: it holds the resource on a shared store.

A holder that may pass holds the gate's own lock for the whole block, and the highest fence that
passed is recorded under it. It is a lock like any other: a process that is stopped inside the block
for longer than the ttl can still act afterwards. If the resource can check fences itself, use that.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from time import monotonic
from typing import Any

from holdfast.claim import LONGEST_NAME_BYTES, Fence, FenceKeys, Keys, Mode
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
LONG_PREFIX = "gate#"
"""Of gates whose resource has a name that is too long to be a part of another one."""
KEEP_SECONDS = 366 * 24 * 3600.0
"""How long a fence is remembered after it was the first to pass with its token."""
MOST_RESOURCES = 100_000
DAY_SECONDS = 24 * 3600.0


class Gate:
    """Gates on one client, one for each resource.

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
        Without keys this object records at most ``limit`` resources a day that were not known
        before, so that invented names can't fill the store; further ones are refused
        (``Unsupported``), those that are known pass as ever.
        """
        if Guarantee.RECORDS not in locks.guarantees:
            raise Unsupported(f"{locks!r} can't keep a gate: its store does not guarantee RECORDS")
        self._locks = locks
        self.fence_keys = FenceKeys(fence_keys) or locks._engine.fence_keys
        self._limit, self._recorded, self._day = limit, 0, monotonic()
        self._options: dict[str, Any] = {"timeout": timeout}
        if ttl is not None:
            self._options["ttl"] = ttl

    @property
    def asynchronous(self) -> bool:
        """Whether its blocks are entered with ``async with``."""
        return hasattr(self._locks, "__aenter__")

    def enter(self, resource: str, lease: Any) -> Any:
        """A block for ``with`` (``async with`` on a client of asyncio) that gives the gate's lease.

        Raises ``StaleFence`` if a newer holder has passed, ``LockTimeout`` if another holder is
        inside for too long. Readers pass together.
        """
        check_resource(resource)
        fence = as_fence(lease, self.fence_keys)
        passing = Passing(self, self._locks, resource, fence, self._options)
        return passing.over_async() if self.asynchronous else passing.over()

    @property
    def full(self) -> bool:
        """Whether resources that are not known yet are refused for now."""
        if monotonic() - self._day >= DAY_SECONDS:
            self._recorded, self._day = 0, monotonic()
        return self._recorded >= self._limit and not self.fence_keys

    def count(self, resource: str) -> None:
        """Counts a resource that is about to be recorded first; raises ``Full`` past the limit."""
        if self.full:
            raise self.refused(resource)
        self._recorded += 1
        if self._recorded == self._limit // 2 + 1 and not self.fence_keys:
            log.warning("a Gate has recorded half of its limit of %d resources a day", self._limit)

    def refused(self, resource: str) -> Full:
        """The error for a resource that there is no room for."""
        return Full(
            f"the gate {resource!r} is new, and this Gate has recorded {self._limit} new ones in a "
            "day: it takes in no more, for names in fences that are not signed may be invented; "
            "use fence_keys, or raise limit"
        )


def gate_name(resource: str) -> str:
    """The name of the lock that is the resource's gate."""
    name = PREFIX + resource
    if len(name.encode()) <= LONGEST_NAME_BYTES:
        return name
    return LONG_PREFIX + hashlib.sha256(resource.encode()).hexdigest()


class Passing:
    """One fence at one gate."""

    def __init__(
        self, owner: Gate, locks: Any, resource: str, fence: Fence, options: dict[str, Any]
    ) -> None:
        self._owner, self._locks, self._resource, self._fence = owner, locks, resource, fence
        self._name, self._options = gate_name(resource), options
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
        run_now(self._room())
        with self._gate() as lease:
            run_now(self._admit(lease))
            yield lease

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """A reader's first entry is recorded, alone; it then passes beside other readers."""
        run_now(self._room())
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
        await self._room()
        async with self._gate() as lease:
            await self._admit(lease)
            yield lease

    @asynccontextmanager
    async def _read_async(self) -> AsyncIterator[Any]:
        await self._room()
        async with self._gate(read=True) as lease:
            if await self._known():
                yield lease
                return
        async with self._write_async():
            pass
        async with self._gate(read=True) as lease:
            await self._known()
            yield lease

    async def _room(self) -> None:
        """Refuses a new resource before its lock is taken: that would leave a trace."""
        if self._owner.full and await self._locks._engine.backend.recall(self._name) is None:
            raise self._owner.refused(self._resource)

    async def _judge(self) -> tuple[Any, Any]:
        """What is remembered, and what would be; raises ``StaleFence``."""
        record = await self._locks._engine.backend.recall(self._name)
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
            self._owner.count(self._resource)
        grant = lease._hold.grant
        if not await self._locks._engine.backend.record(grant, pack(entered), KEEP_SECONDS):
            reason = lease.reason or "the store no longer had it"
            message = f"the gate {self._resource!r} was lost before it was passed: {reason}"
            raise LockLost(message, name=self._name, reason=reason)

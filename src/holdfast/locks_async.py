"""``AsyncLocks``: the asyncio client, the twin of ``Locks``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from holdfast.claim import Keys, LockInfo
from holdfast.core.contract import Guarantee
from holdfast.core.engine import Engine
from holdfast.durations import Duration
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.lease import AsyncLease
from holdfast.locks import Findings, LockInfos, find_url
from holdfast.locks_base import LONGEST_LIST, LocksBase
from holdfast.primitives.election_async import AsyncElection
from holdfast.primitives.lock_async import AsyncLock
from holdfast.primitives.multi_async import AsyncMultiLock
from holdfast.primitives.once_async import AsyncEvery, AsyncOnce
from holdfast.primitives.options import TakeOverOptions

if TYPE_CHECKING:
    from holdfast.core.events import Observer

__all__ = ["AsyncLocks", "connect_async"]

LEAST_CLOSE_SECONDS = 0.1
"""Closing connections that answer takes less than this, also if the store has hung before."""


class _LoopGuard:
    """Refuses the use of a client on two event loops at a time."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise RuntimeError(
                    f"this client to {engine.store.display} is in use on another event loop: "
                    "open a client per loop, or share a blocking one between threads"
                )
            engine.backend.forget()  # its connections ended with their loop
            engine.local_queues.clear()
        self._loop = loop

    def call_back(self, callback: Callable[[str], object], reason: str) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(callback, reason)

    def forked(self) -> None:
        self._loop = None


class AsyncLocks(LocksBase[AsyncLock, AsyncMultiLock, AsyncElection, AsyncOnce, AsyncEvery]):
    """A connection to one store, for the tasks of one event loop at a time."""

    _lock = AsyncLock
    _multi = AsyncMultiLock
    _election = AsyncElection
    _once = AsyncOnce
    _every = AsyncEvery

    def __init__(self, url: str | object, **settings: Any) -> None:
        self._runtime = self._new_runtime()
        super().__init__(url, self._runtime, **settings)
        guard = _LoopGuard()
        self._engine.caller_kind = "task"
        self._engine.call_back = guard.call_back
        self._engine.on_enter = guard.enter
        self._engine.on_fork.append(guard.forked)

    def _new_runtime(self) -> AsyncioRuntime:
        return AsyncioRuntime()

    async def list(self, prefix: str = "", *, limit: int = LONGEST_LIST) -> LockInfos:
        """Names that are held or waited for, with their holders and waiters."""
        return await self._list(prefix, limit)

    async def inspect(self, name: str) -> LockInfo:
        """Holders and waiters of one name."""
        return await self._inspect(name)

    async def break_lock(self, name: str, *, reason: str) -> int | None:
        """Ends the hold of another process, which is reported there as lost; returns its token."""
        return await self._break_lock(name, reason)

    async def take_over(self, text: str, **options: Unpack[TakeOverOptions]) -> AsyncLease:
        """Goes on with a hold that another process has handed over: ``text`` is what its
        ``lease.hand_over()`` returned. Works once; the token of the new lease is higher.

        The options ``timeout`` (here: how long to try again if the store does not answer),
        ``renew``, ``max_hold`` and ``note`` are those of ``lock``. Raises ``LockLost`` if the hold
        is over or was taken over already, ``ValueError`` if ``text`` is no such text, or of another
        store or namespace, ``BackendUnavailable`` if the store did not answer.
        """
        return await self._take_over(AsyncLease, text, options)

    async def check(self) -> Findings:
        """Contacts the store now and verifies what its guarantees rest on."""
        return await self._check()

    async def close(self) -> None:
        """Releases what is still held, each with a warning; ends threads and connections. A store
        that does not answer delays it by half a second, or longer if it was slow before."""
        if self._engine.closed:
            return
        held = self._still_held()
        self._engine.closed = True
        for waiter in self._engine.local_queues.all():
            self._engine.nudge(waiter.claim)
            if waiter.signal is not None:
                waiter.signal.set()
        renewer, runtime = self._engine.renewer, self._runtime
        try:
            await runtime.finish_background(renewer.close_seconds() / 2)
        finally:  # also if this is cancelled: another close() would do nothing
            renewer.close()
            try:
                await asyncio.to_thread(self._renewer_thread.end, None)
            finally:
                left = max(LEAST_CLOSE_SECONDS, renewer.finish_by - runtime.now())
                await runtime.finish(self._engine.backend.close(), left)
        self._warn_held(held)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def connect_async(
    url: str | object | None = None,
    *,
    ttl: Duration = 30,
    timeout: Duration | None = None,
    namespace: str = "holdfast",
    require: Iterable[str | Guarantee] = (),
    patience: Duration = 30,
    connections: int = 4,
    epoch: int = 0,
    fence_keys: Keys = (),
    observers: Iterable[Observer] = (),
) -> AsyncLocks:
    """Opens the asyncio client to a store, with the arguments of ``connect``; contacts nothing yet.

    ``async with connect_async(…) as locks`` closes it at the end. The first call for a store
    imports its code and its client library, which takes about 50 ms, for PostgreSQL 150 ms: call it
    before the loop runs, or by ``await asyncio.to_thread(connect_async, …)``.
    """
    return AsyncLocks(
        find_url(url),
        ttl=ttl,
        timeout=timeout,
        namespace=namespace,
        require=require,
        patience=patience,
        connections=connections,
        epoch=epoch,
        fence_keys=fence_keys,
        observers=observers,
    )

"""The asyncio runtime: one event loop, tasks, futures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Hashable
from contextlib import suppress
from typing import Any, TypeVar

from holdfast.core.contract import Signal
from holdfast.io import clock

__all__ = ["AsyncSignal", "AsyncioRuntime"]

T = TypeVar("T")


class AsyncSignal:
    """An event that any thread may set; a task of its loop waits for it."""

    __slots__ = ("_future", "_loop", "_set")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._set = False
        self._future: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._set = True
        if asyncio._get_running_loop() is self._loop:
            self._wake()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False

    async def wait(self, seconds: float | None) -> bool:
        """Waits for at most ``seconds``; returns whether it was set."""
        if self._set:
            return True
        self._future = self._loop.create_future()
        if self.is_set():  # by another thread, after the first check
            return True
        timer = None if seconds is None else self._loop.call_later(max(0.0, seconds), self._wake)
        try:
            await self._future
        finally:
            self._future = None
            if timer is not None:
                timer.cancel()
        return self._set


class AsyncioRuntime:
    """The runtime of one event loop at a time."""

    blocking = False
    now = staticmethod(clock.now)
    wall = staticmethod(clock.wall)
    between = staticmethod(clock.between)
    mutex = staticmethod(threading.Lock)

    def __init__(self) -> None:
        self._background: set[asyncio.Task[Any]] = set()

    def me(self) -> Hashable:
        return asyncio.current_task()

    where = staticmethod(clock.where)

    def name_of(self, caller: Hashable) -> str:
        return caller.get_name() if isinstance(caller, asyncio.Task) else "?"

    def alive(self, caller: Hashable) -> bool:
        return isinstance(caller, asyncio.Task) and not caller.done()

    def signal(self) -> Signal:
        return AsyncSignal(asyncio.get_running_loop())

    async def wait(self, signal: Signal, until: float | None) -> bool:
        assert isinstance(signal, AsyncSignal)
        return await signal.wait(None if until is None else until - self.now())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def finish(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)  # the loop keeps only weak references
        task.add_done_callback(self._background.discard)
        await asyncio.wait((task,), timeout=seconds)

    async def within(self, work: Coroutine[Any, Any, T], seconds: float) -> T | None:
        with suppress(Exception):
            return await asyncio.wait_for(work, seconds)
        return None

    async def finish_background(self, seconds: float) -> None:
        """Waits for the work of ``finish`` that still runs, and cancels it after ``seconds``."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=seconds)
            for task in late:
                task.cancel()

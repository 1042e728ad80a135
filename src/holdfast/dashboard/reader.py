"""Reads a store for all viewers together: ``Reader`` on an event loop, ``ReaderThread`` for a
terminal."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from holdfast import AsyncLocks, Holder, HoldfastError, Locks
from holdfast.dashboard.watch import MOST_NAMES, Watch

__all__ = ["HoldersChanged", "Reader", "ReaderThread"]

IDLE_SECONDS = 600.0
"""How long a store is read after the last viewer has left."""
END = object()


class HoldersChanged(HoldfastError):
    """The name has other holders than the caller has seen; the text says whether one was ended."""


def _check_holders(name: str, holders: Iterable[Holder], tokens: frozenset[int]) -> None:
    """Raises ``HoldersChanged`` unless the name is held with these tokens."""
    found = {holder.token for holder in holders}
    if not found:
        raise HoldersChanged(f"nobody holds {name!r} any more: nothing was broken")
    if found != tokens:
        raise HoldersChanged(f"{name!r} has another holder now: nothing was broken; look again")


def _check_ended(name: str, ended: int, tokens: frozenset[int]) -> None:
    """Raises ``HoldersChanged`` if a hold was ended that the caller has not seen: a store is asked
    for the holders first, and told to end the hold then."""
    if ended not in tokens:
        words = f"the hold with token {ended} was ended, which is not the one that you saw"
        raise HoldersChanged(f"{name!r} has changed its holder at this moment: {words}")


class Reader:
    """Reads a store in a task of the running event loop, from ``start`` on."""

    def __init__(self, locks: Locks | AsyncLocks, always: bool) -> None:
        self.watch = Watch()
        self.viewers = 0
        self.ended = False
        """Whether the server shuts down: viewers are to go."""
        self._locks, self._always = locks, always
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._viewed_at = self.watch.time()

    def start(self) -> None:
        """Begins to read unless that is under way; to be called for each viewer."""
        self.viewed()
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._news = asyncio.Event()
            self._task = loop.create_task(self._run(), name="holdfast-dashboard")

    def viewed(self) -> None:
        """Takes in that a viewer looked until now."""
        self._viewed_at = self.watch.time()

    def end(self) -> None:
        """Lets the viewers go; also from a signal handler or another thread."""
        self.ended = True
        if self._task is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._task.get_loop().call_soon_threadsafe(self._news.set)

    async def stop(self) -> None:
        """Ends the reading."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def news(self, seconds: float) -> None:
        """Returns after the next reading, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def break_lock(self, name: str, tokens: frozenset[int], reason: str) -> int | None:
        """Breaks a name that is held with these tokens; raises ``HoldersChanged`` if it is not.
        Returns the highest token that was ended."""
        holders = (await self._call(self._locks.inspect, name)).holders
        _check_holders(name, holders, tokens)
        token: int | None = await self._call(self._locks.break_lock, name, reason=reason)
        if token is not None:
            _check_ended(name, token, tokens)
            self.watch.broke(name, holders, reason)
        return token

    async def _run(self) -> None:
        while self._is_wanted():
            await self._read()
            news, self._news = self._news, asyncio.Event()
            news.set()
            await asyncio.sleep(self.watch.pause_seconds)

    def _is_wanted(self) -> bool:
        if self._always or self.viewers:
            return True
        return self.watch.time() - self._viewed_at < IDLE_SECONDS

    async def _read(self) -> None:
        watch, began = self.watch, self.watch.time()
        try:
            watch.read(await self._call(self._locks.list, limit=MOST_NAMES + 1), began)
        except Exception as error:  # noqa: BLE001 - shown to the viewers, whatever it is
            watch.failed(error)
        if watch.check_is_due:
            try:
                watch.checked(await self._call(self._locks.check))
            except Exception as error:  # noqa: BLE001
                watch.check_failed(error)

    async def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls a method of either client without blocking the loop."""
        if isinstance(self._locks, AsyncLocks):
            return await method(*arguments, **options)
        return await asyncio.to_thread(method, *arguments, **options)


class ReaderThread:
    """Reads a store in a thread, and breaks locks there: a store that hangs delays no key."""

    def __init__(self, locks: Locks, on_news: Callable[[], object]) -> None:
        self.watch = Watch()
        self.message = ""
        """What became of the last break."""
        self._locks, self._on_news = locks, on_news
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-top", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its present request; does not wait for it."""
        self._orders.put(END)

    def break_lock(self, name: str, tokens: frozenset[int], reason: str) -> None:
        """Breaks a name that is held with these tokens; ``message`` tells the outcome later."""
        self.message = f"breaking {name!r} …"
        self._orders.put((name, tokens, reason))

    def _run(self) -> None:
        while True:
            read_once(self._locks, self.watch)
            self._on_news()
            with suppress(queue.Empty):
                order = self._orders.get(timeout=self.watch.pause_seconds)
                if order is END:
                    return
                self._break(*order)

    def _break(self, name: str, tokens: frozenset[int], reason: str) -> None:
        try:
            holders = self._locks.inspect(name).holders
            _check_holders(name, holders, tokens)
            token = self._locks.break_lock(name, reason=reason)
            if token is None:
                raise HoldersChanged(f"nobody holds {name!r} any more: nothing was broken")
            _check_ended(name, token, tokens)
        except Exception as error:  # noqa: BLE001 - shown, whatever it is
            self.message = str(error) or type(error).__name__
            return
        self.watch.broke(name, holders, reason)
        self.message = f"broke {name!r}: the hold with token {token} is ended"


def read_once(locks: Locks, watch: Watch) -> None:
    """One reading of the store, and a check if that is due."""
    began = watch.time()
    try:
        watch.read(locks.list(limit=MOST_NAMES + 1), began)
    except Exception as error:  # noqa: BLE001 - shown, whatever it is
        watch.failed(error)
    if watch.check_is_due:
        try:
            watch.checked(locks.check())
        except Exception as error:  # noqa: BLE001
            watch.check_failed(error)

"""Wake-up hubs: many waiters share one subscription, and only the waiter that is woken runs.

Blocking: one of the waiting threads reads the subscription for all of them, and makes another one
the reader when it leaves. So no extra thread stands between the store and the waiter. Asyncio: the
connection calls ``wake`` when a message arrives.

A wake-up for a key that does not wait yet is kept, so nothing is lost between a store's answer and
the wait that follows it.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from holdfast.io.clock import now

if TYPE_CHECKING:
    import asyncio  # imported in functions below: the blocking client does not load it

__all__ = ["EVERYBODY", "AsyncWakeupHub", "BlockingWakeupHub", "Subscription"]

KEPT_WAKEUPS = 4096
"""How many wake-ups without a waiter are kept. A wake-up for a waiter that has just left is never
fetched: the oldest are dropped."""
LONGEST_WAIT_SECONDS = 3600.0
EVERYBODY = ""
"""The key that wakes all waiters: some wake-ups may have been lost."""


def _poller(*filenos: int) -> Callable[[float], list[tuple[int, int]]]:
    """A function that waits up to so many milliseconds and returns the readable descriptors. Poll
    needs no kernel object, unlike epoll and kqueue."""
    if not hasattr(select, "poll"):
        return lambda limit: [(f, 0) for f in select.select(filenos, [], [], limit / 1000)[0]]
    poll = select.poll()
    for fileno in filenos:
        poll.register(fileno, select.POLLIN)
    return poll.poll


class Subscription(Protocol):
    """The source that a blocking wake-up hub reads."""

    def fileno(self) -> int: ...

    def read(self) -> list[str]:
        """The keys to wake, without blocking. Raises ``OSError`` or ``BackendUnavailable`` when the
        source is broken; the hub then drops it."""
        ...

    def close(self) -> None: ...


class _Waiter:
    __slots__ = ("event", "is_reader", "woken")

    def __init__(self) -> None:
        self.event: threading.Event | None = None
        """Wakes the thread; ``None`` if it is the reader from the start."""
        self.is_reader = False
        self.woken = False


class BlockingWakeupHub:
    """Waits of many threads on one subscription."""

    def __init__(self) -> None:
        # Re-entrant: a signal handler may wait or wake while its own thread runs code in here.
        self._mutex = threading.RLock()
        self._waiting: dict[str, _Waiter] = {}
        self._kept: dict[str, None] = {}
        self._has_reader = False
        self._subscription: Subscription | None = None
        self._interrupted = False
        """Whether an interrupt ended the subscription: the next reader raises ``OSError``."""
        self._closed = False
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)
        self._wake_fileno = self._inside.fileno()
        self._polled: Subscription | None = None
        self._ready = _poller(self._wake_fileno)

    @property
    def subscription(self) -> Subscription | None:
        """The source; ``None`` before ``attach`` and after the source broke."""
        return self._subscription

    def attach(self, subscription: Subscription) -> None:
        """Installs a source. Earlier wake-ups are lost: attempt again afterwards. After ``close``
        the new source is closed at once."""
        with self._mutex:
            old: Subscription | None = subscription
            if not self._closed:
                old, self._subscription, self._interrupted = self._subscription, subscription, False
        if old is not None:
            old.close()
        self._wake_reader()

    def wake(self, key: str) -> None:
        """Wakes one waiter, from any thread."""
        with self._mutex:
            is_reader = self._wake(key)
        if is_reader:
            self._wake_reader()

    def _wake(self, key: str) -> bool:
        """Marks a waiter as woken; returns whether it is the reader, which has to be
        interrupted."""
        waiter = self._waiting.get(key)
        if waiter is None:
            if key == EVERYBODY:
                return any(list(map(self._wake, list(self._waiting))))
            self._kept[key] = None
            if len(self._kept) > KEPT_WAKEUPS:
                del self._kept[next(iter(self._kept))]
            return False
        waiter.woken = True
        if waiter.event is not None:
            waiter.event.set()
        return waiter.is_reader

    def _wake_reader(self) -> None:
        with suppress(OSError):  # its buffer is full already, or it is closed
            self._outside.send(b"x")

    def forget(self, key: str) -> None:
        """Drops a kept wake-up whose waiter will not wait."""
        self._kept.pop(key, None)

    def wait(self, key: str, until: float, subscription: Subscription | None = None) -> bool:
        """Waits until ``until``; returns whether it was woken. The error of a broken subscription
        is raised once, in one thread. With ``subscription``, the source that is expected to wake
        it, returns at once if another source is attached by now."""
        waiter = _Waiter()
        try:  # an interrupt at any point must not leave the others without a reader
            with self._mutex:
                self._waiting[key] = waiter  # first: from here on a wake-up is not kept
                current = self._subscription
                other = (
                    subscription is not None and current is not None and subscription is not current
                )
                if other or key in self._kept or self._closed:
                    self._kept.pop(key, None)
                    return True
                if self._has_reader:
                    waiter.event = threading.Event()
                else:
                    waiter.is_reader = self._has_reader = True
            while not waiter.woken and (left := until - now()) > 0:
                if waiter.is_reader or waiter.event is None:
                    self._read(left)
                elif waiter.event.wait(min(left, LONGEST_WAIT_SECONDS)):
                    waiter.event.clear()  # woken, or made the reader
            return waiter.woken
        finally:
            try:
                self._leave(key, waiter)
            except BaseException:  # an interrupt right here: the others still need a reader
                self._leave(key, waiter)
                raise

    def _leave(self, key: str, waiter: _Waiter) -> None:
        with self._mutex:
            if self._waiting.get(key) is waiter:
                del self._waiting[key]
            if waiter.is_reader:
                self._has_reader = bool(self._waiting) and self._choose_reader()
                waiter.is_reader = False
            if self._closed and not self._waiting:
                self.discard()

    def _choose_reader(self) -> bool:
        """Makes one of the remaining waiters the reader; returns whether there is one."""
        left = [other for other in self._waiting.values() if not other.woken or other.is_reader]
        reader = max(left, key=lambda other: other.is_reader, default=None)
        if reader is None:
            return False
        reader.is_reader = True
        if reader.event is not None:
            reader.event.set()
        return True

    def _read(self, seconds: float) -> None:
        """Polls the subscription once, for all waiters, and wakes those that it names."""
        if self._interrupted:
            self._interrupted = False
            raise OSError("an interrupt stopped a read of the subscription")
        subscription = self._subscription
        if subscription is not self._polled and not self._watch(subscription):
            return
        for fileno, _ in self._ready(min(seconds, LONGEST_WAIT_SECONDS) * 1000):
            if fileno == self._wake_fileno:
                self._drain()
            elif subscription is not None:
                # Inline, not a method: all waiters depend on how fast this runs.
                try:
                    keys = subscription.read()
                    with self._mutex:
                        for key in keys:
                            waiter = self._waiting.get(key)
                            if waiter is not None and waiter.event is None:
                                waiter.woken = True  # this thread: the only reader
                            else:
                                self._wake(key)
                except BaseException as error:
                    self._break(subscription, error)
                    if not self._is_by_closing(error):
                        raise

    def _watch(self, subscription: Subscription | None) -> bool:
        """Polls this subscription from now on; false if the hub was closed just now."""
        try:
            subscriptions = () if subscription is None else (subscription.fileno(),)
            self._ready = _poller(self._wake_fileno, *subscriptions)
        except (OSError, ValueError) as error:
            if self._is_by_closing(error):
                return False
            raise
        self._polled = subscription
        return True

    def _is_by_closing(self, error: BaseException) -> bool:
        """Whether the hub was closed by another thread, which made the subscription fail. The wait
        then ends as woken: what its error says would be of no use."""
        return self._closed and isinstance(error, Exception)

    def _break(self, subscription: Subscription, error: BaseException) -> None:
        with self._mutex:
            if self._subscription is subscription:
                self._subscription = None
                self._interrupted = not isinstance(error, Exception)
                self._wake(EVERYBODY)  # the error is raised in one thread only
        subscription.close()

    def _drain(self) -> None:
        try:
            while len(self._inside.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Ends all waits at once; later waits end at once, too."""
        with self._mutex:
            self._closed = True
            subscription, self._subscription = self._subscription, None
            self._wake(EVERYBODY)
            if not self._waiting:
                self.discard()
        self._wake_reader()
        if subscription is not None:
            subscription.close()

    def discard(self) -> None:
        """Closes our own sockets. In a forked child nothing else is needed: no waiters exist, and
        the mutex may be locked for ever."""
        self._inside.close()
        self._outside.close()


class AsyncWakeupHub:
    """Waits of many tasks of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._kept: dict[str, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self, key: str) -> None:
        """Wakes one waiter, from any thread."""
        import asyncio

        loop = self._loop
        if loop is not None and asyncio._get_running_loop() is not loop:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.wake, key)
            return
        future = self._waiting.get(key)
        if future is None:
            self._kept[key] = None
            if len(self._kept) > KEPT_WAKEUPS:
                del self._kept[next(iter(self._kept))]
        elif not future.done():
            future.set_result(True)

    def forget(self, key: str) -> None:
        """Drops a kept wake-up whose waiter will not wait."""
        self._kept.pop(key, None)

    async def wait(self, key: str, until: float) -> bool:
        """Waits until ``until``; returns whether it was woken."""
        import asyncio

        self._loop = asyncio.get_running_loop()
        if key in self._kept:
            del self._kept[key]
            return True
        future: asyncio.Future[bool] = self._loop.create_future()
        self._waiting[key] = future
        timer = self._loop.call_later(max(0.0, until - now()), _run_out, future)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(key, None)

    def wake_all(self) -> None:
        """Ends all waits at once: the source broke or is closed."""
        for key in list(self._waiting):
            self.wake(key)


def _run_out(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)

"""Many waiters, one source of wake-ups: who is woken returns, nobody else stirs.

Blocking: of all the threads that wait, one listens to the socket for all of them and passes
the task on when it leaves, so no thread of our own stands between the store and the waiter.
Asyncio: the wire calls ``wake`` as messages come in.

A ring for somebody who does not wait yet is kept, so nothing is lost between a store's answer
and the wait that follows it.
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
    import asyncio  # where it runs it is imported by then: the blocking client does without

__all__ = ["EVERYBODY", "AsyncWakeupHub", "BlockingWakeupHub", "Subscription"]

# Rings for waiters that left in the same moment are never asked for: forget them in the end.
KEPT_WAKEUPS = 4096
LONGEST_WAIT_SECONDS = 3600.0
EVERYBODY = ""
"""The key that wakes all who wait: some of their own wakes may have been lost."""


def _watch(*filenos: int) -> Callable[[float], list[tuple[int, int]]]:
    """Tells which of them can be read, within so many milliseconds. Poll needs no kernel object of
    its own, unlike epoll and kqueue."""
    if not hasattr(select, "poll"):
        return lambda limit: [(f, 0) for f in select.select(filenos, [], [], limit / 1000)[0]]
    poll = select.poll()
    for fileno in filenos:
        poll.register(fileno, select.POLLIN)
    return poll.poll


class Subscription(Protocol):
    """What a blocking wake-up hub listens to."""

    def fileno(self) -> int: ...

    def read(self) -> list[str]:
        """The keys that were woken since, without blocking. Raises ``OSError`` or
        ``BackendUnavailable`` when the source is broken; the wake-up hub then drops it."""
        ...

    def close(self) -> None: ...


class _Waiter:
    __slots__ = ("event", "leads", "woken")

    def __init__(self) -> None:
        self.event: threading.Event | None = None
        """What wakes it, unless it listens from the start."""
        self.leads = False
        self.woken = False


class BlockingWakeupHub:
    """Waits of many threads on one subscription."""

    def __init__(self) -> None:
        # Re-entrant: a signal handler may wait or ring in the middle of what its thread does here.
        self._mutex = threading.RLock()
        self._waiting: dict[str, _Waiter] = {}
        self._kept: dict[str, None] = {}
        self._led = False
        self._subscription: Subscription | None = None
        self._torn = False
        """Whether an interrupt ended the subscription: the next who listens tells so."""
        self._closed = False
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)
        self._called = self._inside.fileno()
        self._listened: Subscription | None = None
        self._ready = _watch(self._called)

    @property
    def subscription(self) -> Subscription | None:
        """The source, or None before ``attach`` and after it broke."""
        return self._subscription

    def attach(self, subscription: Subscription) -> None:
        """Installs a source. Rings that came before it are lost: attempt again afterwards. One
        that comes after ``close`` is closed, too."""
        with self._mutex:
            old: Subscription | None = subscription
            if not self._closed:
                old, self._subscription, self._torn = self._subscription, subscription, False
        if old is not None:
            old.close()
        self._stir()

    def wake(self, key: str) -> None:
        """Rings one waiter, from any thread."""
        with self._mutex:
            stir = self._wake(key)
        if stir:
            self._stir()

    def _wake(self, key: str) -> bool:
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
        return waiter.leads

    def _stir(self) -> None:
        with suppress(OSError):  # full of calls already, or closed
            self._outside.send(b"x")

    def forget(self, key: str) -> None:
        """Drops a ring that was kept for somebody who will not come."""
        self._kept.pop(key, None)

    def wait(self, key: str, until: float, subscription: Subscription | None = None) -> bool:
        """Whether it was woken by then. Raises what a broken subscription raises, once, in one
        thread. With
        the subscription that is to ring it, it returns at once if another hangs there by now."""
        waiter = _Waiter()
        try:  # an interrupt at any point must not leave the others without a listener
            with self._mutex:
                self._waiting[key] = waiter  # first: a ring from here on is not kept any more
                hangs = self._subscription
                other = subscription is not None and hangs is not None and subscription is not hangs
                if other or key in self._kept or self._closed:
                    self._kept.pop(key, None)
                    return True
                if self._led:
                    waiter.event = threading.Event()
                else:
                    waiter.leads = self._led = True
            while not waiter.woken and (left := until - now()) > 0:
                if waiter.leads or waiter.event is None:
                    self._listen(left)
                elif waiter.event.wait(min(left, LONGEST_WAIT_SECONDS)):
                    waiter.event.clear()  # woken, or made the listener
            return waiter.woken
        finally:
            try:
                self._leave(key, waiter)
            except BaseException:  # an interrupt right here must not strand the others
                self._leave(key, waiter)
                raise

    def _leave(self, key: str, waiter: _Waiter) -> None:
        with self._mutex:
            if self._waiting.get(key) is waiter:
                del self._waiting[key]
            if waiter.leads:
                self._led = bool(self._waiting) and self._pass_on()
                waiter.leads = False
            if self._closed and not self._waiting:
                self.discard()

    def _pass_on(self) -> bool:
        """Makes one of those who are left the listener; whether there is one."""
        left = [other for other in self._waiting.values() if not other.woken or other.leads]
        heir = max(left, key=lambda other: other.leads, default=None)
        if heir is None:
            return False
        heir.leads = True
        if heir.event is not None:
            heir.event.set()
        return True

    def _listen(self, seconds: float) -> None:
        """One round of listening, for all."""
        if self._torn:
            self._torn = False
            raise OSError("an interrupt came while the bell was read")
        subscription = self._subscription
        if subscription is not self._listened:
            subscriptions = () if subscription is None else (subscription.fileno(),)
            self._ready = _watch(self._called, *subscriptions)
            self._listened = subscription
        for fileno, _ in self._ready(min(seconds, LONGEST_WAIT_SECONDS) * 1000):
            if fileno == self._called:
                self._drain()
            elif subscription is not None:
                # Here and not in a method of its own: everybody waits for this one to run.
                try:
                    keys = subscription.read()
                    with self._mutex:
                        for key in keys:
                            waiter = self._waiting.get(key)
                            if waiter is not None and waiter.event is None:
                                waiter.woken = True  # it listens itself, as the only one does
                            else:
                                self._wake(key)
                except BaseException as error:
                    self._break(subscription, error)
                    raise

    def _break(self, subscription: Subscription, error: BaseException) -> None:
        with self._mutex:
            if self._subscription is subscription:
                self._subscription = None
                self._torn = not isinstance(error, Exception)
                self._wake(EVERYBODY)  # the error goes to one of them, and the others hear nothing
        subscription.close()

    def _drain(self) -> None:
        try:
            while len(self._inside.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Ends all waits at once; later ones too."""
        with self._mutex:
            self._closed = True
            subscription, self._subscription = self._subscription, None
            self._wake(EVERYBODY)
            if not self._waiting:
                self.discard()
        self._stir()
        if subscription is not None:
            subscription.close()

    def discard(self) -> None:
        """Closes our own sockets. In a forked child, where nobody waits and the mutex may be
        locked for ever, this is all there is to do."""
        self._inside.close()
        self._outside.close()


class AsyncWakeupHub:
    """Waits of many tasks of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._kept: dict[str, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self, key: str) -> None:
        """Rings one waiter, from any thread."""
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
        """Drops a ring that was kept for somebody who will not come."""
        self._kept.pop(key, None)

    async def wait(self, key: str, until: float) -> bool:
        """Whether it was woken by then."""
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

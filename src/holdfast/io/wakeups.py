"""Wake-ups: many waiters share one subscription, and only the waiter that is woken runs.

``Wakeups`` subscribes when the first waiter comes, and again after the subscription broke; while
there is none, waiters poll. It works over either hub. Blocking: one of the waiting threads reads
the subscription for all of them, and makes another one the reader when it leaves. So no extra
thread stands between the store and the waiter. Asyncio: the event loop reads it when a message
arrives.

A wake-up for a key that does not wait yet is kept, so nothing is lost between a store's answer and
the wait that follows it.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.core.backoff import SUBSCRIPTION_LOST_SECONDS
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import between, now
from holdfast.io.limits import SingleFlight, look_by, open_by

if TYPE_CHECKING:
    import asyncio  # imported in functions below: the blocking client does not load it

    from holdfast.io.aio import Watcher
    from holdfast.io.connection import Connection

__all__ = [
    "EVERYBODY",
    "AsyncWakeupHub",
    "BlockingWakeupHub",
    "Hub",
    "Messages",
    "Subscription",
    "Wakeups",
    "new_hub",
    "poller",
]

KEPT_WAKEUPS = 4096
"""How many wake-ups without a waiter are kept. A wake-up for a waiter that has just left is never
fetched: the oldest are dropped."""
KEPT_VALUES = 4096
LONGEST_WAIT_SECONDS = 3600.0
EVERYBODY = ""
"""The key that wakes all waiters: some wake-ups may have been lost."""


def poller(*filenos: int) -> Callable[[float], list[tuple[int, int]]]:
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


class OwnSubscription(Subscription, Protocol):
    """A source that an event loop can read, too."""

    def forget(self, *, keep_number: bool = False) -> None: ...


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
        self._lost: Callable[[Subscription], None] | None = None
        self._closed = False
        self._sockets: tuple[socket.socket, ...] = ()
        """To interrupt the reader; made by the first one: a client that never waits has none."""
        self._pairs: dict[str, tuple[socket.socket, socket.socket]] = {}
        self._wake_fileno = -1
        self._polled: Subscription | None = None
        self._ready = poller()

    @property
    def subscription(self) -> Subscription | None:
        """The source; ``None`` before ``attach`` and after the source broke."""
        return self._subscription

    def attach(
        self, subscription: Subscription, lost: Callable[[Subscription], None] | None = None
    ) -> None:
        """Installs a source. Earlier wake-ups are lost: attempt again afterwards. After ``close``
        the new source is closed at once. When it breaks, ``lost`` is called, and ``wait`` raises,
        in one thread."""
        with self._mutex:
            old: Subscription | None = subscription
            if not self._closed:
                old, self._subscription, self._interrupted = self._subscription, subscription, False
                self._lost = lost
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

    def _open(self) -> None:
        """Makes the sockets. A signal handler may do so in the middle of it: all of them use the
        pair that was made first."""
        made = socket.socketpair()
        for sock in made:
            sock.setblocking(False)
        pair = self._pairs.setdefault("first", made)  # one step, which no handler can divide
        if pair is not made:
            for sock in made:
                sock.close()
        self._wake_fileno, self._polled = pair[0].fileno(), None
        self._ready = poller(self._wake_fileno)
        self._sockets = pair

    def _wake_reader(self) -> None:
        for sock in self._sockets[1:]:
            with suppress(OSError):  # its buffer is full already, or it is closed
                sock.send(b"x")

    def forget(self, key: str) -> None:
        """Drops a kept wake-up whose waiter will not wait."""
        self._kept.pop(key, None)

    def wake_all(self) -> None:
        """Wakes all waiters."""
        self.wake(EVERYBODY)

    async def waited(
        self, key: str, until: float, subscription: Subscription | None = None
    ) -> bool:
        """``wait`` for code that is written once; never suspends."""
        return self.wait(key, until, subscription)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)

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
                    if not self._sockets:
                        self._open()
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
            self._ready = poller(self._wake_fileno, *subscriptions)
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
        # First, and without the mutex, as it may need one of its own. An interrupt before the next
        # lines leaves the subscription, which breaks again for the next reader.
        if self._lost is not None:
            self._lost(subscription)
        with self._mutex:
            if self._subscription is subscription:
                self._subscription = None
                self._interrupted = not isinstance(error, Exception)
                self._wake(EVERYBODY)  # the error is raised in one thread only
        subscription.close()

    def _drain(self) -> None:
        try:
            while len(self._sockets[0].recv(4096)) == 4096:
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
        for sock in self._sockets:
            sock.close()


class AsyncWakeupHub:
    """Waits of many tasks of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._kept: dict[str, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher: Watcher | None = None
        self._closed = False

    def attach(
        self, subscription: OwnSubscription, lost: Callable[[Subscription], None] | None = None
    ) -> None:
        """Reads a source when it has something, instead of the source before. After ``close`` it is
        closed at once. When it breaks, ``lost`` is called, and after a pause all waiters are
        woken."""
        from holdfast.io.aio import Watcher

        if self._closed:
            subscription.close()
            return

        def read() -> None:
            try:
                for key in subscription.read():
                    self.wake(key)
            except BaseException as error:
                watcher.close()
                self._lose(watcher, subscription, lost)
                if not isinstance(error, OSError):
                    raise

        old, self._watcher = self._watcher, None
        if old is not None:
            old.close()
        self._watcher = watcher = Watcher(subscription, read)

    def _lose(
        self,
        watcher: Watcher,
        subscription: Subscription,
        lost: Callable[[Subscription], None] | None,
    ) -> None:
        if self._watcher is watcher:
            self._watcher = None
            watcher.loop.call_later(between(*SUBSCRIPTION_LOST_SECONDS), self.wake_all)
        if lost is not None:
            lost(subscription)

    def wake(self, key: str) -> None:
        """Wakes one waiter, from any thread."""
        import asyncio

        loop = self._loop
        if loop is not None and asyncio._get_running_loop() is not loop:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.wake, key)
            return
        future = self._waiting.get(key)
        if future is not None and not future.done():
            future.set_result(True)
        elif future is None or not (future.cancelled() or future.result()):
            # Nobody waits, or the time of a wait has just run out: it may begin again.
            self._kept[key] = None
            if len(self._kept) > KEPT_WAKEUPS:
                del self._kept[next(iter(self._kept))]

    def forget(self, key: str) -> None:
        """Drops a kept wake-up whose waiter will not wait."""
        self._kept.pop(key, None)

    async def wait(self, key: str, until: float) -> bool:
        """Waits until ``until``; returns whether it was woken."""
        import asyncio

        self._loop = asyncio.get_running_loop()
        if key in self._kept or self._closed:
            self._kept.pop(key, None)
            return True
        future: asyncio.Future[bool] = self._loop.create_future()
        self._waiting[key] = future
        timer = self._loop.call_later(max(0.0, until - now()), _run_out, future)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(key, None)

    async def waited(
        self, key: str, until: float, subscription: Subscription | None = None
    ) -> bool:
        """The same. With ``subscription``, the source that is expected to wake it, returns at once
        if that is not attached any more."""
        watcher: Any = self._watcher
        if subscription is not None and watcher is not None and watcher.source is not subscription:
            return True
        return await self.wait(key, until)

    async def pause(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)

    def wake_all(self) -> None:
        """Ends all waits at once: the source broke or is closed."""
        for key in list(self._waiting):
            self.wake(key)

    def close(self) -> None:
        """Ends all waits at once; later waits end at once, too."""
        self._closed = True
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()
        self.wake_all()

    def discard(self) -> None:
        """In a forked child, or on a later event loop: lets the source go."""
        if self._watcher is not None:
            self._watcher.forget()


def _run_out(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)


class Messages:
    """A subscription over a connection: what it receives wakes waiters, perhaps with a value."""

    def __init__(
        self, connection: Connection, parse: Callable[[Any], Iterable[tuple[str, Any]]]
    ) -> None:
        from holdfast.io.connection import PENDING

        self.connection, self._pending = connection, PENDING
        self._parse = parse
        """Gives the keys that a message wakes, each with its value or ``None``."""
        self.values: dict[str, Any] = {}
        """By key: the value of its newest wake-up, until the woken waiter takes it. Values of
        waiters that are gone are dropped, oldest first, once there are ``KEPT_VALUES``."""
        # Re-entrant: a signal handler may send while its own thread reads.
        self._mutex = threading.RLock()

    def fileno(self) -> int:
        if self.connection.fd < 0:
            raise OSError(errno.EBADF, "the subscription's connection is closed")
        return self.connection.fd

    def send(self, request: Any) -> None:
        """Sends a request, from any thread; what does not fit is sent with the next one."""
        with self._mutex:
            self.connection.send(request)
            if self.connection.unsent:
                self.connection.flush()

    def read(self) -> list[str]:
        keys, connection, pending = [], self.connection, self._pending
        with self._mutex:
            connection.collect()
            if connection.unsent:
                connection.flush()
            while (message := connection.next()) is not pending:
                for key, value in self._parse(message):
                    keys.append(key)
                    if value is not None:
                        self.values[key] = value
        while len(self.values) > KEPT_VALUES:
            self.values.pop(next(iter(self.values)), None)
        return keys

    def close(self) -> None:
        self.connection.close()

    def forget(self, *, keep_number: bool = False) -> None:
        self.connection.forget(keep_number=keep_number)


class Hub(Protocol):
    """What ``Wakeups`` needs of its world."""

    def attach(
        self, subscription: OwnSubscription, lost: Callable[[Subscription], None] | None = None
    ) -> None: ...
    async def waited(
        self, key: str, until: float, subscription: Subscription | None = None
    ) -> bool: ...
    async def pause(self, seconds: float) -> None: ...
    def wake(self, key: str) -> None: ...
    def wake_all(self) -> None: ...
    def forget(self, key: str) -> None: ...
    def discard(self) -> None: ...
    def close(self) -> None: ...


def new_hub(*, blocking: bool) -> Hub:
    """A hub for threads, or for the tasks of an event loop."""
    return BlockingWakeupHub() if blocking else AsyncWakeupHub()


Subscribe = Callable[[float], Awaitable[Messages | None]]
"""Opens a subscription by a deadline; ``None`` if there can be none."""


class Wakeups:
    """The waiters of a backend, and the subscription that wakes them.

    Each subscription has a generation number. A waiter relies on a subscription only if it was live
    when the waiter's request was sent: otherwise the wake-up may have been missed.
    """

    def __init__(self, *, blocking: bool) -> None:
        self._blocking = blocking
        self._begin()

    def _begin(self) -> None:
        self.generation = 0
        """The number of the live subscription, counted from 1; 0 while there is none."""
        self.polling = False
        """Whether there can be no subscription, so that waiters poll."""
        self._count = 0
        self._hub = new_hub(blocking=self._blocking)
        self._single_flight = SingleFlight()
        self._subscription: Messages | None = None

    async def wait(
        self,
        key: str,
        generation: int,
        until: float,
        subscribe: Subscribe,
    ) -> Any:
        """Waits until woken, at most until ``until``. Returns the value that came with the wake-up,
        if any.

        Returns at once if ``generation``, the subscription that was live when the request was sent,
        is not the live one: the wake-up may have been missed. ``subscribe`` opens a subscription by
        its deadline; it raises ``BackendUnavailable``, and returns ``None`` if there can be none.
        """
        try:
            if not self.generation and not await self._subscribe(until, subscribe):
                await self._hub.waited(key, look_by(until))
                return None
            subscription = self._subscription
            if subscription is None or not generation or generation != self.generation:
                return None
            await self._wait_on(subscription, key, until)
            return subscription.values.pop(key, None)
        except OSError:  # the subscription broke
            self.drop()
            await self._hub.pause(between(*SUBSCRIPTION_LOST_SECONDS))
            return None

    async def _wait_on(self, subscription: Messages, key: str, until: float) -> None:
        """Waits for a wake-up by this subscription, the live one."""
        await self._hub.waited(key, until, subscription)

    async def _subscribe(self, until: float, subscribe: Subscribe) -> bool:
        """True if there is a subscription now. False while another caller opens it, or if it
        failed."""
        permit = None if self.polling else self._single_flight.begin()
        if permit is None:
            return False
        began = now()
        try:
            if not self.generation:
                made = await subscribe(open_by(until, inf))
                if made is None:
                    self.polling = True
                    return False
                self._attach(made)
        except BackendUnavailable:
            # The next attempt raises the error, if it persists. The back-off of the single flight
            # prevents a busy loop until then.
            self._single_flight.failed(began)
            return False
        finally:
            self._single_flight.end(permit)
        self._hub.wake_all()  # waiters that poll can rely on the subscription now
        return True

    def _attach(self, subscription: Messages) -> None:
        try:
            self._count += 1
            # In this order: it may break, in another thread, as soon as it is attached.
            self._subscription, self.generation = subscription, self._count
            self._hub.attach(subscription, self._lost)
        except BaseException:
            self.generation = 0
            subscription.close()
            raise

    def _lost(self, subscription: Subscription) -> None:
        if self._subscription is subscription:
            self.generation = 0

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def discard(self, key: str) -> None:
        """Drops a kept wake-up and its value: their waiter will not wait."""
        if self._subscription is not None:
            self._subscription.values.pop(key, None)
        self._hub.forget(key)

    def drop(self) -> None:
        """Gives up a subscription that broke, or whose server was replaced. All waiters attempt
        again, and the first one to wait subscribes again."""
        self.generation = 0
        self._hub.wake_all()

    def forget(self) -> None:
        """In a forked child, or on a later event loop: lets the subscription go."""
        if self._blocking and self._subscription is not None:
            self._subscription.forget()
        self._hub.discard()

    def close(self) -> None:
        self._hub.close()

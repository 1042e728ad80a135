"""The driver for event loops: waiting, a pipelined or exclusive connection, and pools of them.

A connection's descriptor is watched with ``add_reader``: there are no transports, so any loop that
has it will do. A client may be used on one event loop after another; what belongs to a loop that
was closed is closed when it is next looked at, or with the loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.io.clock import now
from holdfast.io.connection import PENDING, READ, WRITE, AllBusy, Broken, Connection, Endpoint
from holdfast.io.sockets import Found, Lookup, is_address, of_address, resolver
from holdfast.io.wakeups import poller

__all__ = [
    "AsyncPool",
    "AsyncWorld",
    "Channel",
    "close_with_loop",
    "unwatch",
    "watch",
]

TICKS = 4
"""How often the timer of a connection looks at its oldest request before that times out."""
NEGLIGIBLE_SECONDS = 0.05
"""A deadline this close to the usual one gets no timer of its own."""
LEAST_SECONDS = 0.001
MARGIN_SECONDS = 0.02
"""So much earlier than its request an opening ends: its own error says more than a timeout."""
LONGEST_WAIT_SECONDS = 3600.0

T = TypeVar("T")


class AsyncWorld:
    """Waits in a task of the running loop."""

    blocking = False

    async def resolve(self, host: str, port: int, until: float) -> list[Found]:
        if is_address(host):
            return of_address(host, port)
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answered.set)

        lookup = Lookup(host, port, notify)
        resolver.ask(lookup)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - now())):
                    await answered.wait()
            return lookup.result()
        finally:
            lookup.given_up = True

    async def ready(self, fds: dict[int, int], until: float) -> list[int]:
        loop = asyncio.get_running_loop()
        found: list[int] = []
        future: asyncio.Future[None] = loop.create_future()

        def end(number: int | None = None) -> None:
            if number is not None and number not in found:
                found.append(number)
            if not future.done():
                future.set_result(None)

        seconds = min(max(0.0, until - now()), LONGEST_WAIT_SECONDS)
        timer = loop.call_later(seconds, end)
        watched = []
        try:
            for number, wish in fds.items():
                watch(loop, number, wish, end, number)
                watched.append(number)
            await future
            return found
        finally:
            timer.cancel()
            for number in watched:
                unwatch(loop, number)

    async def run(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        return await _BlockingWork(work, undo).result()


class _BlockingWork(Generic[T]):
    """Blocking work on a thread of its own, for one task. A result that the task does not get is
    undone, by whichever of the two comes second: the loop may end before anything is delivered."""

    def __init__(self, work: Callable[[], T], undo: Callable[[T], object]) -> None:
        self._work, self._undo = work, undo
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[T] = self._loop.create_future()
        self._made: list[T] = []
        """The result, until the task has it or it is undone."""
        self._given_up = False

    async def result(self) -> T:
        # Not the loop's executor: it may be full of the program's own work, which waits for us.
        name = "holdfast-blocking-work"
        threading.Thread(target=self._run, name=name, daemon=True).start()
        try:
            result = await self._future
        except BaseException:
            self._given_up = True  # first: from here on the thread undoes what it makes
            self._undo_made()
            raise
        self._made.clear()
        return result

    def _run(self) -> None:
        try:
            self._made.append(self._work())
            deliver, value = self._future.set_result, self._made[0]
        except BaseException as error:  # noqa: BLE001 - raised on the loop
            self._deliver(partial(self._future.set_exception, error))
            return
        if self._given_up:
            self._undo_made()
        else:
            self._deliver(partial(deliver, value))

    def _deliver(self, settle: Callable[[], None]) -> None:
        def settle_once() -> None:
            if not self._future.done():
                settle()

        try:
            self._loop.call_soon_threadsafe(settle_once)
        except RuntimeError:  # the loop is closed
            self._undo_made()

    def _undo_made(self) -> None:
        with suppress(IndexError):  # nothing is made, or the other one undoes it
            self._undo(self._made.pop())


WORLD = AsyncWorld()


def watch(
    loop: asyncio.AbstractEventLoop,
    number: int,
    wish: int,
    callback: Callable[..., object],
    *arguments: Any,
) -> None:
    """Calls back whenever the descriptor has an event that is wished for. Raises
    ``BackendUnavailable`` on a loop that can't do that."""
    try:
        if wish & READ:
            loop.add_reader(number, callback, *arguments)
        if wish & WRITE:
            loop.add_writer(number, callback, *arguments)
    except NotImplementedError:
        raise BackendUnavailable(
            "the asyncio client of this store needs an event loop with add_reader, which "
            f"{type(loop).__name__} has not: use "
            "asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)",
            final=True,
        ) from None


def unwatch(loop: asyncio.AbstractEventLoop, number: int) -> None:
    """Ends ``watch``. To be called before the descriptor is closed: a new one may get its number,
    and the loop would not notice."""
    if number >= 0 and not loop.is_closed():
        loop.remove_reader(number)
        loop.remove_writer(number)


class Closable(Protocol):
    """Something to be closed when its event loop ends."""

    def close(self) -> None: ...


_open: dict[asyncio.AbstractEventLoop, tuple[AsyncGenerator[None, None], WeakSet[Any]]] = {}
"""What is open on each loop, and the generator that closes it when the loop ends."""


def close_with_loop(thing: Closable) -> None:
    """Closes the thing when the running loop ends as in ``asyncio.run``, which closes asynchronous
    generators but no sockets, and later loops can't."""
    loop = asyncio.get_running_loop()
    if loop not in _open:
        for ended in [each for each in list(_open) if each.is_closed()]:
            _open.pop(ended, None)
        things: WeakSet[Any] = WeakSet()
        ending = _close_at_end(loop, things)
        _open[loop] = ending, things
        with suppress(StopIteration):  # it runs to its ``yield``, without waiting
            ending.__anext__().__await__().send(None)
    _open[loop][1].add(thing)


async def _close_at_end(
    loop: asyncio.AbstractEventLoop, things: WeakSet[Any]
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        _open.pop(loop, None)
        for thing in list(things):
            thing.close()


class Source(Protocol):
    """Something with a descriptor: a connection, or what reads one."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...
    def forget(self, *, keep_number: bool = False) -> None: ...


class Watcher:
    """A source that an event loop reads. It ends in the right order, in any loop, and in a forked
    child."""

    def __init__(self, source: Source, readable: Callable[[], object]) -> None:
        self.source = source
        self.loop = asyncio.get_running_loop()
        self.open = True
        self.fd = source.fileno()
        self._process = os.getpid()
        watch(self.loop, self.fd, READ, readable)
        close_with_loop(self)

    def close(self) -> None:
        """Closes the source, also if its loop is closed or another one runs; once."""
        if not self.open:
            return
        self.open = False
        if self._process == os.getpid():
            unwatch(self.loop, self.fd)
            self.source.close()
        else:
            # The selector and the socket are the parent's, too.
            self.source.forget(keep_number=True)

    def forget(self) -> None:
        """In a forked child, or after the loop was closed: lets the source go."""
        self.close()


class Channel:
    """One connection on one event loop. Requests are pipelined, any number of them.

    The reply to a cancelled request is dropped when it comes: a cancellation costs no connection,
    and a request that undoes it runs after it. Futures fail with the endpoint's error.
    """

    def __init__(self, connection: Connection, endpoint: Endpoint) -> None:
        self.connection, self.endpoint = connection, endpoint
        self.broken: OSError | None = None
        """Why it can't be used any more."""
        self._seconds = endpoint.request_seconds
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future
        self._waiting: deque[asyncio.Future[Any]] = deque()
        """Requests without a reply, oldest first, if replies come in order."""
        self._tickets: dict[Any, asyncio.Future[Any]] = {}
        """The same by ticket, if they do not."""
        self._deliver = self._in_order if connection.ordered else self._by_ticket
        self._timing = self._writing = False
        self._oldest: asyncio.Future[Any] | None = None
        self._ticks = 0
        self._watcher = Watcher(connection, self._readable)
        self._fd = connection.fd
        self._has_input = poller(self._fd)

    def request(self, request: Any) -> asyncio.Future[Any]:
        """Sends one request. Raises the endpoint's error if the channel is broken."""
        if self.broken is not None:
            raise self.failure()
        future = self._future()
        try:  # an interrupt within ends the channel: a request and its reply stay together
            self._waiting.append(future)
            ticket = self.connection.send(request)
            if ticket is not None:
                self._tickets[ticket] = self._waiting.pop()
            if self.connection.unsent:
                self._write_later()
            if not self._timing:
                self._begin_timing()
        except BaseException as error:  # noqa: BLE001 - raised again by fail
            self.fail(error)
        return future

    def requests(self, requests: Sequence[Any]) -> list[asyncio.Future[Any]]:
        """The same for several requests, in one write."""
        if not self.connection.ordered or len(requests) == 1:
            return [self.request(request) for request in requests]
        if self.broken is not None:
            raise self.failure()
        futures = [self._future() for _ in requests]
        try:
            self._waiting.extend(futures)
            self.connection.send_all(requests)
            if self.connection.unsent:
                self._write_later()
            if not self._timing:
                self._begin_timing()
        except BaseException as error:  # noqa: BLE001 - raised again by fail
            self.fail(error)
        return futures

    def _begin_timing(self) -> None:
        self._loop.call_later(self._seconds / TICKS, self._time)
        self._timing = True

    def _write_later(self) -> None:
        if not self._writing and self.broken is None:
            self._loop.add_writer(self._fd, self._writable)
            self._writing = True

    def _writable(self) -> None:
        try:
            done = self.connection.flush()
        except BaseException as error:  # noqa: BLE001 - raised again by fail
            self.fail(error)
            return
        if done:
            self._writing = False
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            self.connection.collect()
            self._deliver()
            if self.connection.unsent:  # by a protocol that answers by itself
                self._write_later()
        except BaseException as error:  # noqa: BLE001 - raised again by fail
            self.fail(error)

    def _in_order(self) -> None:
        following, waiting = self.connection.next, self._waiting
        while (reply := following()) is not PENDING:
            if not waiting:  # it would be taken for the next reply
                raise Broken("the server sent a reply without a request")
            future = waiting[0]  # until it is done: ``fail`` ends those that wait
            if not future.done():
                future.set_result(reply)
            waiting.popleft()

    def _by_ticket(self) -> None:
        following, tickets = self.connection.next, self._tickets
        while (found := following()) is not PENDING:
            ticket, reply = found
            future = tickets.get(ticket)
            if future is not None and not future.done():
                future.set_result(reply)
            tickets.pop(ticket, None)

    def _first(self) -> asyncio.Future[Any] | None:
        """The oldest request without a reply."""
        if self._waiting:
            return self._waiting[0]
        return next(iter(self._tickets.values()), None)

    def _time(self) -> None:
        """One timer for all requests: looks whether the oldest one is still the same. It stops when
        no request waits."""
        try:
            first = self._first()
            if first is None or self.broken is not None:
                self._timing, self._oldest = False, None
                return
            self._ticks = self._ticks + 1 if first is self._oldest else 0
            self._oldest = first
            if self._ticks >= TICKS:
                self.fail(TimeoutError())
            else:
                self._begin_timing()
        except BaseException as error:  # noqa: BLE001 - raised again by fail
            self.fail(error)

    def failure(self) -> Exception:
        """The endpoint's error; a new one each time, as many tasks may raise it."""
        return self.endpoint.failure(self.broken or Broken("it is closed"), self._seconds)

    def fail(self, error: BaseException) -> None:
        """Closes the connection; all requests without a reply fail. An error that is no
        ``OSError`` is raised again: it is a bug, or an interrupt."""
        if self.broken is None:
            self.broken = error if isinstance(error, OSError) else Broken(f"{error!r}")
            self._watcher.close()
            waiting = [*self._waiting, *self._tickets.values()]
            self._waiting.clear()
            self._tickets.clear()
            for future in waiting:
                if not future.done() and not self._loop.is_closed():
                    future.set_exception(self.failure())
        if not isinstance(error, OSError):
            raise error

    def look(self) -> bool:
        """Reads what has come while the loop stood still; false if the channel is broken."""
        if self.broken is None and self.connection.look_first and self._has_input(0):
            self._readable()
        return self.broken is None

    def rest(self, until: float) -> asyncio.Future[Any] | None:
        """For the cancelled request of an exclusive channel: a future that is done with its reply,
        or when the channel has failed, at ``until`` at the latest. ``None`` if none is due."""
        if self.broken is not None or not self._waiting:
            return None
        self._waiting[-1] = rest = self._future()
        timer = self._loop.call_later(max(0.0, until - now()), self.fail, TimeoutError())

        def end(done: asyncio.Future[Any]) -> None:
            timer.cancel()
            done.exception()  # nobody else asks for it

        rest.add_done_callback(end)
        return rest

    def close(self) -> None:
        """Closes the connection, in any loop, also if its own is closed."""
        self.fail(Broken("the connection was closed"))

    def runs_here(self) -> bool:
        """Whether the running loop is the one that the channel was opened on."""
        return self._loop is asyncio.get_running_loop()

    def forget(self) -> None:
        """In a forked child, or after the loop was closed: lets the connection go."""
        if self.broken is None:
            self.broken = Broken("the connection belongs to the parent process", closed=True)
            self._watcher.forget()


class AsyncPool:
    """Connections to one server, for the tasks of one event loop. Raises the endpoint's errors.

    Pipelined: one connection for all requests, opened at first use and again after it broke, and
    exclusive ones for ``alone``. Otherwise all are exclusive: at most ``limit``, each for one
    request at a time. That of a cancelled request is closed; if the request has an owner, it stays
    in use until the reply or the deadline, and the owner's next request waits for that: so a
    request that undoes the cancelled one runs after it.
    """

    def __init__(self, endpoint: Endpoint, limit: int, *, pipelined: bool = True) -> None:
        self.endpoint, self.limit, self.pipelined = endpoint, limit, pipelined
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._channel: Channel | None = None
        self._idle: list[Channel] = []
        self._all: WeakSet[Channel] = WeakSet()
        """With those in use: for a forked child, and for a later event loop."""
        self._opening = asyncio.Lock()
        self._exclusive = asyncio.Semaphore(self.limit)
        self._cancelled: dict[str, asyncio.Future[Any]] = {}
        """By owner: done when the owner's cancelled request was answered, or can't be."""

    def request(self, request: Any, until: float | None = None, owner: str = "") -> Awaitable[Any]:
        """Sends one request; its reply comes by ``until``."""
        if not self.pipelined:
            return self._request_alone(request, until, owner)
        channel = self._channel
        if channel is None or channel.broken is not None or self._in_a_hurry(until):
            return self._request(request, until)
        return channel.request(request)

    def _in_a_hurry(self, until: float | None) -> bool:
        if until is None:
            return False
        return until - now() < self.endpoint.request_seconds - NEGLIGIBLE_SECONDS

    async def _request(self, request: Any, until: float | None) -> Any:
        return (await self.requests((request,), until))[0]

    async def _request_alone(self, request: Any, until: float | None, owner: str) -> Any:
        return (await self._exclusively((request,), until, owner))[0]

    async def requests(self, requests: Sequence[Any], until: float | None = None) -> list[Any]:
        """Sends many requests at once; returns their replies, in order, all by ``until``."""
        if self._closed or not self.pipelined:
            return await self.alone(requests, until)
        return await self._within(until, self._pipeline, requests)

    async def _pipeline(self, requests: Sequence[Any], until: float) -> list[Any]:
        channel = self._channel
        if channel is None or channel.broken is not None:
            channel = await self._connect(until)
        return await _all(channel.requests(requests))

    async def alone(self, requests: Sequence[Any], until: float | None = None) -> list[Any]:
        """Sends requests that may block their connection, over one that nothing else uses."""
        return await self._exclusively(requests, until, "")

    async def _exclusively(
        self, requests: Sequence[Any], until: float | None, owner: str
    ) -> list[Any]:
        if self._cancelled and owner in self._cancelled:
            # However long its own deadline lasts: sooner, this would overtake it.
            await asyncio.wait([self._cancelled[owner]])
        seconds = self._seconds(until)
        by = now() + seconds
        permits = self._exclusive
        await self._admit(permits, by, seconds)
        # Nothing is awaited between, so the permit is given back in any case.
        return await self._within(by, self._alone, requests, permits, owner)

    def _seconds(self, until: float | None) -> float:
        usual = self.endpoint.request_seconds
        return usual if until is None else max(LEAST_SECONDS, min(usual, until - now()))

    async def _within(
        self,
        until: float | None,
        work: Callable[..., Awaitable[list[Any]]],
        requests: Sequence[Any],
        *more: Any,
    ) -> list[Any]:
        seconds = self._seconds(until)
        try:
            async with asyncio.timeout(seconds):
                return await work(requests, now() + seconds, *more)
        except HoldfastError:
            raise
        except OSError as error:
            raise self.endpoint.failure(error, seconds) from error

    async def _alone(
        self, requests: Sequence[Any], until: float, permits: asyncio.Semaphore, owner: str
    ) -> list[Any]:
        channel: Channel | None = None
        rest: asyncio.Future[Any] | None = None
        try:
            channel = self._pop_idle() or await self._open(until - MARGIN_SECONDS)
            return await _all(channel.requests(requests))
        except BaseException as error:
            # By its own deadline a request is cancelled, too.
            if isinstance(error, asyncio.CancelledError) and owner and now() < until:
                rest = None if channel is None else channel.rest(until)
            if channel is not None and rest is None:
                channel.close()
            raise
        finally:
            if channel is None or rest is None:
                self._give(channel, permits)
            else:
                self._give_later(channel, permits, rest, owner)

    async def _admit(self, permits: asyncio.Semaphore, until: float, seconds: float) -> None:
        """Waits until fewer than ``limit`` requests are under way. Not inside the timeout of the
        request: two that end in the same round of the loop would hide the reason."""
        if not permits.locked():
            await permits.acquire()  # at once
            return
        try:
            async with asyncio.timeout(until - now()):
                await permits.acquire()
        except TimeoutError:
            busy = AllBusy(f"all {self.limit} connections are busy")
            raise self.endpoint.failure(busy, seconds) from busy

    def _give_later(
        self,
        channel: Channel,
        permits: asyncio.Semaphore,
        rest: asyncio.Future[Any],
        owner: str,
    ) -> None:
        def give(_: object) -> None:
            if self._cancelled.get(owner) is rest:
                del self._cancelled[owner]
            self._give(channel, permits)

        self._cancelled[owner] = rest
        rest.add_done_callback(give)

    def _give(self, channel: Channel | None, permits: asyncio.Semaphore) -> None:
        """Ends the exclusive use of a channel, if one was opened."""
        if channel is not None and channel.broken is None:
            if self._closed or not channel.connection.usable or not channel.runs_here():
                channel.close()
            else:
                self._idle.append(channel)
        permits.release()

    def _pop_idle(self) -> Channel | None:
        while self._idle:
            channel = self._idle.pop()
            if not channel.runs_here():
                channel.forget()  # of a loop that has ended
            elif channel.look():
                return channel
        return None

    async def _connect(self, until: float) -> Channel:
        async with self._opening:
            channel = self._channel
            if channel is None or channel.broken is not None:
                channel = self._channel = await self._open(until)
            if self._closed:
                self.reset()  # this request fails; a later one gets a connection of its own
            return channel

    async def _open(self, until: float) -> Channel:
        connection = await self.endpoint.open(WORLD, until)
        try:
            channel = Channel(connection, self.endpoint)
            self._all.add(channel)
            return channel
        except BaseException:
            connection.close()
            raise

    def reset(self) -> None:
        """Closes all connections: the next request opens a new one."""
        for channel in self._take_all():
            channel.close()

    def _take_all(self) -> list[Channel]:
        channels, self._channel, self._idle = [self._channel, *self._idle], None, []
        return [channel for channel in channels if channel is not None]

    def forget(self) -> None:
        """In a forked child, or on a later event loop."""
        for channel in list(self._all):
            channel.forget()
        self._reset()

    def close(self) -> None:
        """Closes all connections. A later request opens one and closes it at its end."""
        self._closed = True
        self.reset()


async def _all(futures: list[asyncio.Future[Any]]) -> list[Any]:
    return [await futures[0]] if len(futures) == 1 else await asyncio.gather(*futures)

"""The driver for event loops: waiting, a pipelined or exclusive connection, and pools of them.

A connection's descriptor is watched with ``add_reader``: there are no transports, so any loop that
has it will do. A client may be used on one event loop after another; what belongs to a loop that
was closed is closed when it is next looked at, or with the loop.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.io.clock import now
from holdfast.io.connection import PENDING, READ, WRITE, Broken, Connection, Endpoint
from holdfast.io.sockets import Found, Lookup, is_address, of_address, resolver

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

        timer = loop.call_later(max(0.0, until - now()), end)
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
    request at a time; that of a cancelled request is closed.
    """

    def __init__(self, endpoint: Endpoint, limit: int, *, pipelined: bool = True) -> None:
        self.endpoint, self.limit, self.pipelined = endpoint, limit, pipelined
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._channel: Channel | None = None
        self._idle: list[Channel] = []
        self._opening = asyncio.Lock()
        self._exclusive = asyncio.Semaphore(self.limit)

    def request(self, request: Any, until: float | None = None) -> Awaitable[Any]:
        """Sends one request; its reply comes by ``until``."""
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
        return await self._within(until, self._alone, requests)

    async def _within(
        self,
        until: float | None,
        work: Callable[[Sequence[Any], float], Awaitable[list[Any]]],
        requests: Sequence[Any],
    ) -> list[Any]:
        usual = self.endpoint.request_seconds
        seconds = usual if until is None else max(LEAST_SECONDS, min(usual, until - now()))
        try:
            async with asyncio.timeout(seconds):
                return await work(requests, now() + seconds)
        except HoldfastError:
            raise
        except OSError as error:
            raise self.endpoint.failure(error, seconds) from error

    async def _alone(self, requests: Sequence[Any], until: float) -> list[Any]:
        async with self._exclusive:
            channel = self._pop_idle() or await self._open(until)
            try:
                replies = await _all(channel.requests(requests))
            except BaseException:
                channel.close()
                raise
            if self._closed or not channel.connection.usable:
                channel.close()
            else:
                self._idle.append(channel)
            return replies

    def _pop_idle(self) -> Channel | None:
        while self._idle:
            channel = self._idle.pop()
            if channel.broken is None and channel.runs_here():
                return channel
            channel.forget()  # of a loop that has ended
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
            return Channel(connection, self.endpoint)
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
        for channel in self._take_all():
            channel.forget()
        self._reset()

    def close(self) -> None:
        """Closes all connections. A later request opens one and closes it at its end."""
        self._closed = True
        self.reset()


async def _all(futures: list[asyncio.Future[Any]]) -> list[Any]:
    return [await futures[0]] if len(futures) == 1 else await asyncio.gather(*futures)

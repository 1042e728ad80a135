"""The driver for threads: waiting, and a pool of connections.

No method suspends; those that are ``async`` have the interface of the asyncio driver. An exception
may arrive between any two lines (``KeyboardInterrupt``, or what a signal handler raises): then the
connection that was in use is closed, and no permit and no mutex is lost.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

from holdfast.core.drive import run_now
from holdfast.errors import HoldfastError
from holdfast.io.clock import now
from holdfast.io.connection import PENDING, READ, WRITE, AllBusy, Connection, Endpoint
from holdfast.io.limits import ConnectionLimit, Permit
from holdfast.io.sockets import Found, look_up
from holdfast.io.wakeups import poller

__all__ = ["WORLD", "AwaitedPool", "BlockingPool", "BlockingWorld", "new_pool"]

T = TypeVar("T")

LONGEST_WAIT_SECONDS = 3600.0
LEAST_SECONDS = 0.001
"""What a request gets whose deadline has passed: enough to use a reply that is there."""


class BlockingWorld:
    """Waits in the calling thread."""

    blocking = True

    async def resolve(self, host: str, port: int, until: float) -> list[Found]:
        return look_up(host, port, until)

    async def ready(self, fds: dict[int, int], until: float) -> list[int]:
        return wait_for(fds, until)

    async def run(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        return work()


def wait_for(fds: dict[int, int], until: float) -> list[int]:
    """The descriptors with an event that is wished for; nothing at ``until``."""
    seconds = min(max(0.0, until - now()), LONGEST_WAIT_SECONDS)
    if not hasattr(select, "poll"):
        return _select(fds, seconds)
    poll = select.poll()
    for fd, wish in fds.items():
        poll.register(
            fd, (select.POLLIN if wish & READ else 0) | (select.POLLOUT if wish & WRITE else 0)
        )
    return [fd for fd, _ in poll.poll(seconds * 1000)]


def _select(fds: dict[int, int], seconds: float) -> list[int]:
    readers = [fd for fd, wish in fds.items() if wish & READ]
    writers = [fd for fd, wish in fds.items() if wish & WRITE]
    # A failed connect is reported as an exception on Windows.
    found = select.select(readers, writers, writers, seconds)
    return list(dict.fromkeys(itertools.chain(*found)))


WORLD = BlockingWorld()


class BlockingPool:
    """Connections to one server, each for one request at a time: a LIFO stack. The usual request
    takes no lock. Raises the endpoint's errors."""

    def __init__(self, endpoint: Endpoint, limit: int) -> None:
        self.endpoint, self.limit = endpoint, limit
        self._idle: list[Connection] = []
        self._all: WeakSet[Connection] = WeakSet()
        """With those in use: for a forked child."""
        self._connection_limit = ConnectionLimit(limit)
        self._waiters = self._connection_limit.waiters
        self._closed = False

    def request(self, request: Any, until: float | None = None) -> Any:
        """Sends one request and returns its reply, by ``until``."""
        seconds = self.endpoint.request_seconds
        if until is not None:
            seconds = self._seconds(until)
        try:
            connection = self._idle.pop()
        except IndexError:
            return self.requests((request,), until)[0]
        if connection.look_first and not self._is_alive(connection):
            self.drop(connection)
            return self.requests((request,), until)[0]
        try:
            by = now() + seconds
            ticket = connection.send(request)
            reply = PENDING
            if not connection.unsent and connection.poll(seconds * 1000):
                connection.collect()
                reply = connection.next()
            if reply is PENDING or ticket is not None or connection.unsent:
                reply = self._receive(connection, ticket, reply, by)
        except BaseException as error:
            self.drop(connection)
            self.reset()  # the other connections are as old: they may be broken too
            self._explain(error, seconds)
            raise
        self.give(connection)
        return reply

    def requests(self, requests: Sequence[Any], until: float | None = None) -> list[Any]:
        """Sends many requests at once over one connection, a new one if none is idle; returns their
        replies, in order, all by ``until``."""
        seconds = self._seconds(until)
        by = now() + seconds
        connection = self.take(by)
        try:
            replies = self._exchange(connection, requests, by)
        except BaseException as error:
            self.drop(connection)
            self.reset()
            self._explain(error, seconds)
            raise
        self.give(connection)
        return replies

    def _exchange(self, connection: Connection, requests: Sequence[Any], by: float) -> list[Any]:
        tickets = connection.send_all(requests)
        replies: dict[Any, Any] = {}
        while len(replies) < len(requests):
            reply = self._receive(connection, None, connection.next(), by)
            key, value = (len(replies), reply) if tickets is None else reply
            replies[key] = value
        return [replies[key] for key in tickets or range(len(requests))]

    def _seconds(self, until: float | None) -> float:
        usual = self.endpoint.request_seconds
        return usual if until is None else max(LEAST_SECONDS, min(usual, until - now()))

    def _explain(self, error: BaseException, seconds: float) -> None:
        """Raises the endpoint's error for an ``OSError``."""
        if isinstance(error, OSError) and not isinstance(error, HoldfastError):
            raise self.endpoint.failure(error, seconds) from error

    def _receive(self, connection: Connection, ticket: Any, reply: Any, by: float) -> Any:
        """The reply to a request, by ``by``. ``reply`` is what ``next`` has given already."""
        while True:
            if reply is not PENDING and (ticket is None or reply[0] == ticket):
                if connection.unsent:  # an answer of the protocol itself
                    connection.flush()
                return reply if ticket is None else reply[1]
            if reply is not PENDING:
                pass  # of a request that nobody waits for
            elif connection.unsent:
                # A peer that always has bytes ready has no more time than a silent one.
                if now() >= by or not wait_for({connection.fd: READ | WRITE}, by):
                    raise TimeoutError
                connection.collect()
                connection.flush()
            else:
                left = by - now()
                if left <= 0 or not connection.poll(left * 1000):
                    raise TimeoutError
                connection.collect()
            reply = connection.next()

    # ---- connections

    def take(self, until: float) -> Connection:
        """A connection for this thread alone, which ``give`` or ``drop`` ends. Waits if all are in
        use, and opens one if there may be one more, all by ``until``."""
        found = self._connection_limit.admit(self._pop_alive, until)
        if found is None:
            busy = AllBusy(f"all {self.limit} connections are busy")
            raise self.endpoint.failure(busy, 0.0)
        return self._open(found, until) if isinstance(found, Permit) else found

    def _pop_alive(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if self._is_alive(connection):
                return connection
            self.drop(connection)
        return None

    def _is_alive(self, connection: Connection) -> bool:
        """False if the connection is closed, or has a reply without a request."""
        try:
            if connection.poll(0):
                connection.collect()  # perhaps a session ticket of TLS, or a push
            if connection.unsent:
                connection.flush()
            return connection.next() is PENDING
        except OSError:
            return False

    def _open(self, permit: Permit, until: float) -> Connection:
        seconds = until - now()
        try:
            connection = run_now(self.endpoint.open(WORLD, until))
            connection.permit, connection.poll = permit, poller(connection.fd)
            self._all.add(connection)
        except BaseException as error:
            self._connection_limit.free(permit)
            self._explain(error, seconds)
            raise
        return connection

    def give(self, connection: Connection) -> None:
        """Returns a connection that may be used for another request. One that has another reply
        is closed: the next request would take it for its own."""
        try:
            usable = connection.usable and connection.next() is PENDING
        except OSError:
            usable = False
        if not usable:
            self.drop(connection)
            return
        self._idle.append(connection)
        if self._waiters or self._closed:
            self._notify()

    def drop(self, connection: Connection) -> None:
        """Closes a connection that must not be used again."""
        connection.close()
        self._connection_limit.free(connection.permit)

    def detach(self) -> Connection | None:
        """Takes an idle connection out of the pool for good; ``None`` if there is none. It does
        not count against the limit any more."""
        connection = self._pop_alive()
        if connection is not None:
            self._all.discard(connection)
            self._connection_limit.free(connection.permit)
            connection.permit = None
        return connection

    def _notify(self) -> None:
        self._connection_limit.call()
        if self._closed:
            self.reset()

    def reset(self) -> None:
        """Closes the idle connections: after a failure they may be broken too."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            self.drop(connection)

    def forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        for connection in list(self._all):
            connection.forget()
        self._idle, self._all = [], WeakSet()
        self._connection_limit = ConnectionLimit(self.limit)
        self._waiters = self._connection_limit.waiters

    def close(self) -> None:
        """Closes the idle connections. A later request opens one and closes it at its end."""
        self._closed = True
        self.reset()


class AwaitedPool:
    """A ``BlockingPool`` with the interface of ``io.aio.AsyncPool``: for code that is written once.
    Nothing suspends."""

    def __init__(self, endpoint: Endpoint, limit: int) -> None:
        self.endpoint = endpoint
        self.pool = BlockingPool(endpoint, limit)
        self.request_now = self.pool.request
        """``request`` without a coroutine."""
        self.reset, self.forget, self.close = self.pool.reset, self.pool.forget, self.pool.close

    async def request(self, request: Any, until: float | None = None) -> Any:
        return self.request_now(request, until)

    async def requests(self, requests: Sequence[Any], until: float | None = None) -> list[Any]:
        return self.pool.requests(requests, until)

    async def alone(self, requests: Sequence[Any], until: float | None = None) -> list[Any]:
        """The same: every request has a connection to itself here."""
        return self.pool.requests(requests, until)


def new_pool(endpoint: Endpoint, limit: int, *, blocking: bool) -> Any:
    """A pool with the interface of ``io.aio.AsyncPool``, for threads or for an event loop."""
    if blocking:
        return AwaitedPool(endpoint, limit)
    from holdfast.io.aio import AsyncPool

    return AsyncPool(endpoint, limit)

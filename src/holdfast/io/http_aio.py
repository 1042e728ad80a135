"""Keep-alive HTTP/1.1 to a few equal hosts, asyncio: the twin of ``http``.

A cancelled request closes its connection, so that no other request can read its reply. A client
may be used on one event loop after another; the connections of a loop end with it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakSet

from holdfast.io.aio import WORLD
from holdfast.io.clock import now
from holdfast.io.hosts import describe
from holdfast.io.http import RESET_ON_CLOSE, Reply, Servers

__all__ = ["AsyncConnection", "AsyncHttp", "ConnectionBase", "connect"]

P = TypeVar("P", bound="ConnectionBase")

# Inherited transports of a forked child: kept, so that no destructor uses the parent's loop.
_inherited: list[asyncio.BaseTransport] = []
_open: dict[asyncio.AbstractEventLoop, tuple[AsyncGenerator[None], WeakSet[ConnectionBase]]] = {}
"""The connections of each loop, and the generator that closes them when the loop ends."""


class ConnectionBase(asyncio.Protocol):
    """A transport, and the event loop and the process that it belongs to."""

    __slots__ = ("__weakref__", "_process", "host", "loop", "transport")

    transport: asyncio.Transport

    def __init__(self, host: int) -> None:
        self.host = host
        self.loop = asyncio.get_running_loop()
        self._process = os.getpid()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked by ``isinstance``: the transports of uvloop are not of asyncio's classes.
        self.transport = cast("asyncio.Transport", transport)

    def write(self, data: bytes) -> None:
        """Sends data, unless the connection is closed: ``connection_lost`` follows then, and uvloop
        would raise ``RuntimeError``."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def usable(self) -> bool:
        return not self.transport.is_closing() and not self.loop.is_closed()

    def close(self) -> None:
        """Closes with a reset: unsent data never reaches the server late. In a forked child, and
        after the loop was closed, only detaches from the socket, without sending anything."""
        if self._process != os.getpid():
            _inherited.append(self.transport)
            self._detach()
        elif self.loop.is_closed():
            self._detach()  # the transport's destructor closes the descriptor
        else:
            sock: Any = self.transport.get_extra_info("socket")
            if sock is not None:  # uvloop has none for a transport that is closed already
                with suppress(OSError):  # it is closed already
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self.transport.abort()

    def _detach(self) -> None:
        sock: Any = self.transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, sock.fileno())
        os.close(nothing)


class AsyncConnection(ConnectionBase):
    """One connection, one request at a time."""

    __slots__ = ("_reply", "responses")

    def __init__(self, servers: Servers, host: int) -> None:
        super().__init__(host)
        self.responses = servers.responses()
        self._reply: asyncio.Future[Reply] | None = None

    def data_received(self, data: bytes) -> None:
        try:
            reply = self.responses.feed(data)
        except OSError as error:
            self.fail(error)
            self.transport.abort()
            return
        if reply is not None and self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        lost = exc if isinstance(exc, OSError) else None
        self.fail(lost or ConnectionResetError(0, "the connection was closed"))

    def fail(self, error: OSError) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    async def ask(self, request: bytes, seconds: float) -> Reply:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        self._reply = future
        if self.transport.is_closing():
            raise ConnectionResetError(0, "the connection was closed")
        self.transport.write(request)
        timer = loop.call_later(seconds, self.fail, TimeoutError())
        try:
            return await future
        finally:
            timer.cancel()
            self._reply = None


class AsyncHttp:
    """A limited stack of connections for any number of tasks of one loop."""

    def __init__(self, servers: Servers, connections: int) -> None:
        self.servers, self.connections = servers, connections
        self._idle: list[AsyncConnection] = []
        self._busy: set[AsyncConnection] = set()
        self._open = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._closed = False
        """Requests after ``close`` still get a connection, which is not kept."""

    async def ask(self, line: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        servers = self.servers
        ends = now() + servers.request_seconds
        until = ends if until is None or ends < until else until
        connection = await self._take(until)
        try:
            request = servers.request(connection.host, line, body)
            reply = await connection.ask(request, max(0.0, until - now()))
        except BaseException as error:
            self._drop(connection)
            if not isinstance(error, OSError):
                raise
            servers.failed(connection.host)
            raise servers.unknown(connection.host, line, error) from error
        if reply.status >= 500:  # a node without its leader: another may have one
            servers.failed(connection.host)
        self._put_back(connection)
        return reply

    async def _take(self, until: float) -> AsyncConnection:
        while True:
            if self._idle:
                connection = self._idle.pop()
                if connection.host == self.servers.current and connection.usable():
                    self._busy.add(connection)
                    return connection
                connection.close()
                self._open -= 1
            elif self._open < self.connections:
                break
            else:
                await self._wait_for_permit(until)
        self._open += 1
        try:
            connection = await connect(self.servers, until, AsyncConnection)
        except BaseException:
            self._closed_one()
            raise
        self._busy.add(connection)
        return connection

    async def _wait_for_permit(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._queue.append(future)
        try:
            async with asyncio.timeout(max(0.0, until - now())):
                await future
        except BaseException as error:
            # Woken, and cancelled or out of time in the same round: the wake-up is passed on.
            if future.done() and not future.cancelled():
                self._wake_next()
            if isinstance(error, TimeoutError):
                raise self.servers.unavailable(["every connection is busy"]) from None
            raise
        finally:
            with suppress(ValueError):  # it was woken
                self._queue.remove(future)

    def _wake_next(self) -> None:
        while self._queue:
            future = self._queue.popleft()
            if not future.done():
                future.set_result(None)
                return

    def _put_back(self, connection: AsyncConnection) -> None:
        if self._closed or not connection.responses.keep_alive:
            self._drop(connection)
            return
        self._busy.discard(connection)
        self._idle.append(connection)
        if self._queue:
            self._wake_next()

    def _drop(self, connection: AsyncConnection) -> None:
        self._busy.discard(connection)
        connection.close()
        self._closed_one()

    def _closed_one(self) -> None:
        self._open -= 1
        self._wake_next()

    def forget(self) -> None:
        inherited = [*self._idle, *self._busy]
        self._idle, self._busy, self._open = [], set(), 0
        self._queue = deque()
        for connection in inherited:
            connection.close()

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            connection = self._idle.pop()
            connection.close()
            self._open -= 1
        await asyncio.sleep(0)  # a transport closes in the next round of the loop


async def connect(servers: Servers, until: float, make: Callable[[Servers, int], P]) -> P:
    """Connects a protocol to the first host that accepts, starting with the current one."""
    servers.context()  # raises here, and is not counted as a host that failed
    tried: list[str] = []
    for _ in servers.hosts:
        host = servers.current
        left = until - now()
        if left <= 0:
            break
        try:
            share = left / (len(servers.hosts) - len(tried))
            return await _connect(servers, host, now() + share, make)
        except (OSError, ValueError) as error:
            tried.append(f"{servers.name(host)}: {describe(error)}")
            servers.failed(host)
    raise servers.unavailable(tried or ["no time was left"])


async def _connect(
    servers: Servers, host: int, until: float, make: Callable[[Servers, int], P]
) -> P:
    """Connects to the first address of a host that accepts. Raises ``OSError``, by ``until``."""
    context = servers.context()
    name, port = servers.hosts[host]
    found = await WORLD.resolve(name, port, until)
    failure: OSError | None = None
    for number, (family, _, _, _, address) in enumerate(found):
        try:
            # The last address may use all the time that is left; the others must leave some.
            async with asyncio.timeout((until - now()) / (len(found) - number)):
                _, made = await asyncio.get_running_loop().create_connection(
                    partial(make, servers, host),
                    _text(address),
                    port,
                    family=family,
                    ssl=context,
                    server_hostname=name if context else None,
                )
            await _end_with_loop(made)
            return made
        except OSError as error:
            failure = error
    raise failure or TimeoutError()


async def _end_with_loop(connection: ConnectionBase) -> None:
    """Closes the connection at the end of its loop, if that ends as in ``asyncio.run``."""
    loop = connection.loop
    if loop not in _open:
        for ended in [each for each in list(_open) if each.is_closed()]:
            _open.pop(ended, None)
        connections: WeakSet[ConnectionBase] = WeakSet()
        ending = _close_at_end(loop, connections)
        _open[loop] = ending, connections
        await anext(ending)
    _open[loop][1].add(connection)


async def _close_at_end(
    loop: asyncio.AbstractEventLoop, connections: WeakSet[ConnectionBase]
) -> AsyncGenerator[None]:
    """Waits for ``loop.shutdown_asyncgens``, which closes it as it does every generator."""
    try:
        yield
    finally:
        _open.pop(loop, None)
        for connection in list(connections):
            connection.close()
        await asyncio.sleep(0)  # a transport closes in the next round of the loop


def _text(address: Any) -> str:
    """The address, with its scope id if it has one (IPv6)."""
    scope = address[3] if len(address) > 3 else 0
    return f"{address[0]}%{scope}" if scope else f"{address[0]}"

"""Keep-alive HTTP/1.1 to a few equal hosts, blocking, for Consul.

``Servers`` has what a URL says, and is shared with the asyncio variant, ``http_aio``. Requests go
to the current host; if it fails, the next host becomes the current one. Idle connections are a
stack without a lock. A connection with an unread reply is never used again.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import httptools

from holdfast.io.clock import now
from holdfast.io.hosts import Hosts, Tls, describe
from holdfast.io.limits import ConnectionLimit, Permit
from holdfast.io.sockets import open_socket, readable

__all__ = ["BlockingHttp", "Http", "HttpConnection", "Reply", "Responses", "Servers", "Tls"]

# A connection that was idle for longer is checked before use: its server may have closed it.
TRUSTED_IDLE_SECONDS = 0.02
READ_BYTES = 16_384
MOST_HEAD_BYTES = 65_536
MOST_ANSWER_BYTES = 64 * 2**20
"""The longest answer, head and body."""
LONGEST_INDEX = 20
LONGEST_MESSAGE = 200
# Poll needs no kernel object, unlike epoll, and has no highest descriptor, unlike select.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
# Closes with a reset, so that unsent data never reaches the server late.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Reply(NamedTuple):
    """One HTTP response."""

    status: int
    body: bytes
    seen: int = 0
    """Consul's index of the answer, for blocking queries; 0 for none."""


class Responses:
    """Parses the responses of one connection, from data in pieces of any size."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._index = 0
        self._done = self._headed = False
        self._taken = 0
        """How many bytes of the response have been received so far."""
        self.keep_alive = True
        """Whether the server keeps the connection open after the last response."""

    def on_headers_complete(self) -> None:
        self._headed = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._done = True
        self.keep_alive = self._parser.should_keep_alive()  # the parser knows it only now

    def feed(self, data: bytes) -> Reply | None:
        """The response, once it is complete. Raises ``OSError`` if it is not HTTP, or too long."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            message = f"answered with something that is not HTTP ({error})"
            raise OSError(message[:LONGEST_MESSAGE]) from None
        if not self._done:
            self._taken += len(data)
            if self._taken > (MOST_ANSWER_BYTES if self._headed else MOST_HEAD_BYTES):
                raise OSError("the response is too long")
            return None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        reply = Reply(self._parser.get_status_code(), body, self._index)
        self._body, self._index, self._taken = [], 0, 0
        self._done = self._headed = False
        return reply


class IndexedResponses(Responses):
    """Reads Consul's index header too."""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-consul-index" and value.isdigit() and len(value) <= LONGEST_INDEX:
            self._index = int(value)


class Servers(Hosts):
    """The hosts of one store that is asked over HTTP/1.1."""

    def __init__(
        self,
        display: str,
        hosts: tuple[tuple[str, int], ...],
        *,
        tls: Tls | None,
        request_seconds: float,
        responses: Callable[[], Responses] = Responses,
    ) -> None:
        super().__init__(display, hosts, tls=tls, request_seconds=request_seconds)
        self.responses = responses
        self.headers = b""
        """Header lines that every request carries (credentials)."""

    def request(self, host: int, line: bytes, body: bytes) -> bytes:
        """The bytes of a request. ``line`` is its method and path, such as ``PUT /v1/txn``."""
        return b"%b HTTP/1.1\r\nHost: %b\r\n%bContent-Length: %d\r\n\r\n%b" % (
            line,
            self.authorities[host],
            self.headers,
            len(body),
            body,
        )


class Http(Protocol):
    """What the backends use, blocking or asyncio."""

    servers: Servers

    async def ask(self, line: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        """Sends a request. Raises ``BackendUnavailable`` if no host can be reached, or if there is
        no answer."""
        ...

    def forget(self) -> None: ...

    async def close(self) -> None: ...


class HttpConnection:
    """One blocking connection. Any error leaves it unusable: ``close`` it."""

    __slots__ = ("host", "idle_since", "permit", "readable", "responses", "socket")

    def __init__(self, servers: Servers, host: int, until: float) -> None:
        self.host = host
        self.responses = servers.responses()
        self.idle_since = 0.0
        self.permit: Permit | None = None
        context = servers.context()
        plain = open_socket(*servers.hosts[host], until)
        try:
            plain.settimeout(max(0.001, until - now()))
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.socket = plain
            if context is not None:
                name = servers.hosts[host][0]
                self.socket = context.wrap_socket(plain, server_hostname=name)
            self.readable = readable(self.socket, servers.request_seconds)
        except BaseException:
            plain.close()
            raise

    def ask(self, request: bytes, until: float) -> Reply:
        try:
            left = max(0.001, until - now())
            if self.readable is None:
                self.socket.settimeout(left)
            self.socket.sendall(request)
            while True:
                if self.readable is None:
                    self.socket.settimeout(left)
                if self.readable is not None and not self.readable(left * 1000):
                    raise TimeoutError
                data = self.socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError(0, "the connection was closed")
                reply = self.responses.feed(data)
                if reply is not None:
                    return reply
                left = until - now()
                if left <= 0:
                    raise TimeoutError
        except BlockingIOError:  # the send buffer stayed full for too long
            raise TimeoutError from None

    def usable(self) -> bool:
        """Whether an idle connection has no input, as it should; else its server has closed it."""
        if time.monotonic() - self.idle_since < TRUSTED_IDLE_SECONDS:
            return True
        if self.readable is None:
            return not ready(self.socket, 0.0)
        return not self.readable(0)

    def close(self, *, reset: bool = False) -> None:
        if reset:
            with suppress(OSError):  # it is closed already
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.socket.close()


class BlockingHttp:
    """A limited stack of connections for any number of threads."""

    def __init__(self, servers: Servers, connections: int) -> None:
        self.servers, self.connections = servers, connections
        self._idle: list[HttpConnection] = []
        self._connection_limit = ConnectionLimit(connections)
        self._closed = False
        """Requests after ``close`` still get a connection, which is not kept."""

    async def ask(self, line: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        servers = self.servers
        ends = now() + servers.request_seconds
        until = ends if until is None or ends < until else until
        connection = self._take(until)
        try:
            reply = connection.ask(servers.request(connection.host, line, body), until)
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

    def _take(self, until: float) -> HttpConnection:
        permit: Permit | None = None
        while permit is None:
            try:
                connection = self._idle.pop()
            except IndexError:
                with self._connection_limit.mutex:
                    permit = self._connection_limit.take()
                    if permit is None:
                        self._wait_for_permit(until)
                continue
            if connection.host == self.servers.current and connection.usable():
                return connection
            self._drop(connection)
        try:
            connection = connect(self.servers, until)
        except BaseException:
            self._connection_limit.free(permit)
            raise
        connection.permit = permit
        return connection

    def _wait_for_permit(self, until: float) -> None:
        # Counted before the stack is read; ``_put_back`` pushes before it reads the count.
        self._connection_limit.waiting += 1
        try:
            if not self._idle and not self._connection_limit.wait(until - now()):
                raise self.servers.unavailable(["every connection is busy"])
        finally:
            self._connection_limit.waiting -= 1

    def _put_back(self, connection: HttpConnection) -> None:
        if not connection.responses.keep_alive:
            self._drop(connection)
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if self._closed:
            self._drain()
        if self._connection_limit.waiting:
            self._connection_limit.call()

    def _drop(self, connection: HttpConnection) -> None:
        connection.close(reset=True)
        self._connection_limit.free(connection.permit)

    def forget(self) -> None:
        idle, self._idle = self._idle, []
        # The parent's may be locked for ever.
        self._connection_limit = ConnectionLimit(self.connections)
        for connection in idle:
            connection.close()

    async def close(self) -> None:
        self._closed = True
        self._drain()

    def _drain(self) -> None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            connection.close()
            self._connection_limit.free(connection.permit)


def ready(sock: socket.socket, seconds: float, *, to_write: bool = False) -> bool:
    """Whether a socket can be read, or written, within so many seconds."""
    with _Selector() as selector:
        selector.register(sock, selectors.EVENT_WRITE if to_write else selectors.EVENT_READ)
        return bool(selector.select(seconds))


def connect(servers: Servers, until: float) -> HttpConnection:
    """Connects to the first host that accepts, starting with the current one."""
    servers.context()  # raises here, and is not counted as a host that failed
    tried: list[str] = []
    for _ in servers.hosts:
        host = servers.current
        left = until - now()
        if left <= 0:
            break
        # The last host may use all the time that is left; the others must leave some.
        share = left / (len(servers.hosts) - len(tried))
        try:
            return HttpConnection(servers, host, now() + share)
        except (OSError, ValueError) as error:
            tried.append(f"{servers.name(host)}: {describe(error)}")
            servers.failed(host)
    raise servers.unavailable(tried or ["no time was left"])

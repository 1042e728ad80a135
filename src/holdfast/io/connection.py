"""A protocol on a non-blocking descriptor, without threads or event loops; and how one is opened.

``Connection`` is what the two drivers (``io.blocking`` and ``io.aio``) use: no method of it waits.
``Stream`` is a connection over a socket of our own, plain or TLS. Opening is written once, over a
``World``, which waits for descriptors: the blocking one never suspends (see ``core.drive``). One
deadline bounds a connection's look-up, all of its addresses, TLS and the greeting.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol, TypeVar

from holdfast.io.clock import now
from holdfast.io.sockets import Found

__all__ = [
    "PENDING",
    "READ",
    "WRITE",
    "AllBusy",
    "Broken",
    "Connection",
    "Endpoint",
    "Stream",
    "World",
    "exchange",
    "open_socket",
    "open_unix",
    "world_of",
]

T = TypeVar("T")

READ, WRITE = 1, 2
"""Events of a descriptor; a wish may be both."""
READ_BYTES = 16_384
"""One read. Not less than a TLS record, so that none is left half-read."""
STAGGER_SECONDS = 0.25
"""How long an address has to connect before the next address is tried beside it."""
FULL_QUEUE_SECONDS = 0.01
"""Pause before another try of a UNIX socket whose queue of connections is full."""
_UNDER_WAY = {errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN}
_NOTHING_YET = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

# A connection may be silent for hours. With these the kernel detects a dead peer within half a
# minute.
_KEEP_ALIVE = [
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]


class _Pending:
    def __repr__(self) -> str:
        return "PENDING"


PENDING: Any = _Pending()
"""What ``Connection.next`` returns while no reply is complete."""


class Broken(ConnectionError):
    """The connection can't be used any more: it is closed, or its peer sent what can't be read."""

    def __init__(self, message: str, *, closed: bool = False) -> None:
        super().__init__(message)
        self.closed = closed
        """Whether the peer closed or refused the connection: a retry is cheap then."""


class AllBusy(OSError):
    """All connections of a pool are in use, and none became free in time."""


class Connection:
    """Owns one non-blocking descriptor. No method waits. After any exception: close it.

    It is used by one thread at a time; a driver that shares it among threads has a mutex. The
    methods that send and read raise ``Broken``, or another ``OSError``.
    """

    ordered: ClassVar[bool] = True
    """Whether replies come in the order of the requests. Otherwise ``send`` returns a ticket, and
    ``next`` returns pairs of a ticket and its reply."""

    fd: int = -1
    """What a driver waits on; -1 once closed."""
    unsent: Any = b""
    """True while ``flush`` has something left. ``collect`` may add to it, for a protocol that
    answers by itself: a driver looks at it after ``collect``, too."""
    usable: bool = True
    """False if this connection must not be used for another request."""
    look_first: ClassVar[bool] = False
    """Whether a pool reads what has come on an idle connection before it sends a request there: for
    servers that end idle sessions."""
    on_push: Callable[[Any], None] | None = None
    """Called by ``collect`` with each message that answers no request."""
    permit: Any = None
    """For the driver: the permit of its connection limit."""
    poll: Any = None
    """For the driver: what waits for input."""

    def fileno(self) -> int:
        return self.fd

    next: Callable[[], Any]
    """The next complete reply, or ``PENDING``."""

    def send(self, request: Any) -> Any:
        """Writes what fits now; the rest is ``unsent``. Returns the ticket of the request, if the
        protocol has tickets."""
        raise NotImplementedError

    def send_all(self, requests: Sequence[Any]) -> Any:
        """The same for several requests, in one write if possible. Returns their tickets, if the
        protocol has them."""
        tickets = [self.send(request) for request in requests]
        return None if self.ordered else tickets

    def flush(self) -> bool:
        """Writes more of ``unsent``; true when nothing is left."""
        raise NotImplementedError

    def collect(self) -> None:
        """Reads once and parses. Harmless if there is nothing to read. Raises ``Broken`` at the end
        of the stream."""
        raise NotImplementedError

    def close(self) -> None:
        """Never waits. A driver that watches ``fd`` in an event loop stops that first."""
        raise NotImplementedError

    def forget(self, *, keep_number: bool = False) -> None:
        """In a forked child: lets the descriptor go without a word to the peer.

        With ``keep_number`` its number stays taken: the event loop that the child inherits believes
        to know that number, and would fail for the next file that gets it.
        """
        raise NotImplementedError


class Stream(Connection):
    """Bytes over a socket of our own, plain or TLS. A subclass sets ``feed`` and ``next``."""

    feed: Callable[[bytes], object]
    """Takes received bytes; raises ``Broken`` if they can't be read."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.fd = sock.fileno()
        self._write, self._recv = sock.send, sock.recv
        self._pending = sock.pending if isinstance(sock, ssl.SSLSocket) else None
        self.unsent = b""

    def send(self, request: bytes) -> Any:
        if self.unsent:  # behind what was sent before
            self.unsent += request
            return
        try:
            sent = self._write(request)
        except _NOTHING_YET:
            sent = 0
        except OSError as error:
            raise _broken(error) from error
        if sent != len(request):
            self.unsent = request[sent:]

    def send_all(self, requests: Sequence[bytes]) -> Any:
        # One write: two system calls cost more than a copy.
        return self.send(b"".join(requests))

    def flush(self) -> bool:
        rest, self.unsent = self.unsent, b""
        if rest:
            Stream.send(self, rest)
        return not self.unsent

    def collect(self) -> None:
        try:
            data = self._recv(READ_BYTES)
        except _NOTHING_YET:
            return
        except OSError as error:
            raise _broken(error) from error
        if not data:
            raise Broken("closed by the server", closed=True)
        self.feed(data)
        if self._pending is not None and self._pending():
            self._collect_rest(self._pending)

    def _collect_rest(self, pending: Callable[[], int]) -> None:
        """Reads what TLS has decrypted already: no poll would report it."""
        while (size := pending()) > 0:
            try:
                data = self._recv(size)
            except _NOTHING_YET:
                return
            except OSError as error:
                raise _broken(error) from error
            self.feed(data)

    def close(self) -> None:
        self.fd = -1
        self._sock.close()

    def forget(self, *, keep_number: bool = False) -> None:
        self.fd = -1
        number = self._sock.detach()
        with suppress(OSError):
            if keep_number:
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, number)
                os.close(nothing)
            else:
                os.close(number)


def _broken(error: OSError) -> Broken:
    closed = isinstance(error, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
    return Broken(str(error.strerror or error) or type(error).__name__, closed=closed)


class World(Protocol):
    """What opening a connection needs: look-ups and waiting, by threads or on an event loop."""

    blocking: bool
    """Whether nothing ever suspends."""

    async def resolve(self, host: str, port: int, until: float) -> list[Found]:
        """The addresses of a host; not in the caller's thread, unless it is an address. Raises
        ``OSError``, at ``until`` at the latest."""
        ...

    async def ready(self, fds: dict[int, int], until: float) -> list[int]:
        """Waits until descriptors have an event that is wished for; returns these, or nothing at
        ``until``. Without descriptors it is a pause."""
        ...

    async def run(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Runs blocking work and returns its result: here, or for an event loop on a thread of its
        own. If the caller was cancelled before the end, ``undo`` gets the result, on any
        thread."""
        ...


def world_of(*, blocking: bool) -> World:
    """The world of threads, or that of event loops."""
    if blocking:
        from holdfast.io.blocking import WORLD as THREADS

        return THREADS
    from holdfast.io.aio import WORLD as LOOPS

    return LOOPS


class Endpoint(Protocol):
    """One server, as the pool of a driver needs it."""

    request_seconds: float
    """How long a request may take, with opening a connection for it."""

    async def open(self, world: World, until: float) -> Connection:
        """Opens a connection, with its greeting. Raises ``OSError`` or the store's own error, at
        ``until`` at the latest."""
        ...

    def failure(self, error: OSError, seconds: float) -> Exception:
        """The store's own error for a request that failed. ``TimeoutError``: it had so many
        seconds."""
        ...


async def open_socket(
    world: World,
    host: str,
    port: int,
    until: float,
    tls: ssl.SSLContext | None = None,
    server_name: str | None = None,
) -> socket.socket:
    """Connects to a host, with TLS if there is a context for it: then ``server_name`` (the host,
    unless given) is sent, and checked if the context says so. Raises ``OSError``, at ``until`` at
    the latest."""
    found = await world.resolve(host, port, until)
    sock = await _connect_first(world, _families_by_turns(found), until)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if tls is not None:
            sock = tls.wrap_socket(
                sock, server_hostname=server_name or host, do_handshake_on_connect=False
            )
            await _shake_hands(world, sock, until)
    except BaseException:
        sock.close()
        raise
    return sock


async def _shake_hands(world: World, sock: ssl.SSLSocket, until: float) -> None:
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            wish = READ
        except ssl.SSLWantWriteError:
            wish = WRITE
        # A peer that always has bytes ready has no more time than a silent one.
        if now() >= until or not await world.ready({sock.fileno(): wish}, until):
            raise TimeoutError


def _families_by_turns(found: list[Found]) -> list[Found]:
    """The addresses with the families by turns, beginning with the first: if one family leads
    nowhere, the second address belongs to another one."""
    families: dict[Any, list[Found]] = {}
    for each in found:
        families.setdefault(each[0], []).append(each)
    longest = max(map(len, families.values()), default=0)
    return [
        group[number]
        for number in range(longest)
        for group in families.values()
        if number < len(group)
    ]


async def _connect_first(world: World, addresses: list[Found], until: float) -> socket.socket:
    """A socket that is connected to the first address that accepts. The next address is tried as
    soon as one has failed, and otherwise after ``STAGGER_SECONDS``, beside those before it."""
    trying: dict[int, socket.socket] = {}
    failure: OSError | None = None
    following, left = now(), list(addresses)
    try:
        while left or trying:
            moment = now()
            if moment >= until:
                raise TimeoutError
            if left and (moment >= following or not trying):
                following = moment + STAGGER_SECONDS
                try:
                    _begin(left.pop(0), trying)
                except OSError as error:
                    failure = error
                continue
            by = min(until, following) if left else until
            for number in await world.ready(dict.fromkeys(trying, WRITE), by):
                sock = trying.pop(number)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    return sock
                sock.close()
                failure = OSError(code, os.strerror(code))
        raise failure or OSError(0, "the name has no address")
    finally:
        for sock in trying.values():
            sock.close()


def _begin(found: Found, trying: dict[int, socket.socket]) -> None:
    """Begins to connect to an address; raises ``OSError`` if that fails at once."""
    family, kind, protocol, _, address = found
    sock = socket.socket(family, kind, protocol)
    trying[sock.fileno()] = sock
    try:
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code and code not in _UNDER_WAY:
            raise OSError(code, os.strerror(code))
    except OSError:
        del trying[sock.fileno()]
        sock.close()
        raise


async def open_unix(world: World, path: str, until: float) -> socket.socket:
    """Connects to a UNIX socket. Raises ``OSError``, at ``until`` at the latest."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while (code := sock.connect_ex(path)) in _UNDER_WAY:  # its queue is full
            if now() >= until:
                raise TimeoutError
            await world.ready({}, min(until, now() + FULL_QUEUE_SECONDS))
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


async def exchange(
    world: World,
    connection: Connection,
    requests: Sequence[Any],
    until: float,
    replies: list[Any] | None = None,
) -> list[Any]:
    """Sends requests in one write and returns their replies, in order: the greeting of a new
    connection. Only for a connection that nothing else uses. Raises ``OSError``, at ``until`` at
    the latest: what came before that is in ``replies``, an empty list."""
    replies = [] if replies is None else replies
    if not requests:
        return replies
    tickets = connection.send_all(requests)
    while True:
        while len(replies) < len(requests) and (reply := connection.next()) is not PENDING:
            replies.append(reply)
        if len(replies) == len(requests):
            break
        wish = READ | WRITE if connection.unsent else READ
        if now() >= until or not await world.ready({connection.fd: wish}, until):
            raise TimeoutError
        connection.collect()
        if connection.unsent:
            connection.flush()
    if connection.ordered:
        return replies
    by_ticket = dict(replies)
    return [by_ticket[ticket] for ticket in tickets]

"""The handler that kazoo's thread uses for sockets and waiting: one system call instead of five.

kazoo's own handler makes a new selector for every wait and runs callbacks on two more threads. Here
callbacks run on the thread where they occur, and the session's heartbeat runs while kazoo's thread
is idle. That thread reads what no other thread reads: see ``reader``.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable, Sized
from contextlib import suppress
from typing import Any, Protocol

from kazoo.handlers import utils
from kazoo.handlers.threading import SequentialThreadingHandler

from holdfast.io.clock import now
from holdfast.stores.zookeeper.client.reader import YIELD_SECONDS, SharedReader

__all__ = ["KazooHandler", "SessionListener"]

CHUNK_BYTES = 65_536
SEND_SECONDS = 5.0
LEAST_YIELD_SECONDS = 0.01
"""Shortest time that is left to another thread to read the data that has arrived."""
_LENGTH = struct.Struct("!i")
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SessionListener(Protocol):
    """What kazoo's thread reports to a session."""

    floor: float | None
    """The server's shortest session in seconds, once known."""

    def negotiate(self, floor: float) -> float | None:
        """Receives the server's shortest session; returns the session timeout to request, or
        ``None`` to give up."""
        ...

    def connected(self, began: float, granted: float) -> None: ...
    def disconnected(self, *, ended: bool) -> None: ...

    def node_changed(self, path: str) -> None:
        """A watch has fired; called by the thread that reads."""
        ...

    def heartbeat(self) -> float | None:
        """Seconds until the next call; ``None`` if the reply to a heartbeat is long overdue."""
        ...


class BufferedSocket:
    """kazoo's socket with a read buffer: one system call reads all data that has arrived."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.unread = b""
        """Data that has arrived and is left to kazoo, which reads in small pieces."""
        self.over = False
        """Whether we have shut down the connection."""
        self._tls_pending: Callable[[], int] | None = getattr(sock, "pending", None)
        self.setblocking, self.fileno = sock.setblocking, sock.fileno
        self.close, self.getpeername = sock.close, sock.getpeername

    def pending(self) -> int:
        return len(self.unread) or (self._tls_pending() if self._tls_pending is not None else 0)

    def take(self) -> bytes | None:
        """All data that has arrived; ``None`` if there is none, empty at the end."""
        if self.over:
            return b""
        try:
            data: bytes = self._sock.recv(CHUNK_BYTES)
        except _WOULD_BLOCK:
            return None
        return data

    def recv(self, size: int) -> bytes:
        if self.over:
            return b""
        if not self.unread:
            self.unread = self._sock.recv(CHUNK_BYTES)
        chunk, self.unread = self.unread[:size], self.unread[size:]
        return chunk

    def send(self, data: bytes) -> int:
        deadline = now() + SEND_SECONDS
        while True:
            sent = self.send_now(data)
            if sent:
                return sent
            self.wait(deadline)

    def send_now(self, data: bytes | bytearray) -> int:
        """Sends as much as possible without waiting."""
        try:
            return int(self._sock.send(data))
        except _WOULD_BLOCK:
            return 0

    def wait(self, deadline: float) -> None:
        """Waits until more can be sent."""
        left = deadline - now()
        if left <= 0:
            raise TimeoutError("the server takes no more requests")
        utils.selector_select([self._sock], [self._sock], [], min(left, 0.1))

    def shut(self) -> None:
        """Ends the connection: the reader finds its end, and unread data is dropped."""
        self.over, self.unread = True, b""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class WakeupSocket:
    """The end of kazoo's wake-up pair that kazoo's thread reads.

    kazoo expects one byte per request, and would block for a byte that an interrupt has kept from
    being written. Here the bytes only wake the thread: the queue has the requests to send.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.fileno, self.close = sock.fileno, sock.close

    def recv(self, _: int) -> bytes:
        with suppress(BlockingIOError):
            return self._sock.recv(4096)
        return b""


class KazooHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """Runs callbacks on the thread where they occur; a wait is one system call."""

    def __init__(
        self, connect_seconds: float, tls: ssl.SSLContext | None, reader: SharedReader
    ) -> None:
        super().__init__()
        self.listener: SessionListener | None = None
        self.queue: Callable[[], Sized] = tuple
        """The requests that kazoo must still send."""
        self.reader = reader
        self.connect_seconds, self._tls = connect_seconds, tls
        self.any_thread_sends = tls is None
        """A TLS connection must not be read and written at the same time."""
        self._polls: dict[tuple[int, ...], Any] = {}

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def create_socket_pair(self) -> Any:
        inside, outside = socket.socketpair()
        outside.setblocking(False)
        return WakeupSocket(inside), outside

    def create_connection(
        self, address: tuple[str, int], hostname: str = "", timeout: float = 0.0, **_: Any
    ) -> BufferedSocket:
        # kazoo waits for a silent host for the whole session: no other host would be tried.
        seconds = min(timeout or self.connect_seconds, self.connect_seconds)
        sock = socket.create_connection(address, seconds)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=hostname)
        except BaseException:
            sock.close()
            raise
        return BufferedSocket(sock)

    def select(
        self, rlist: list[Any], wlist: list[Any], xlist: list[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        if wlist:
            return [], wlist, []  # the socket itself waits if needed
        sock = rlist[0]
        if len(rlist) == 1 or self.listener is None:
            return (rlist if sock.pending() else self._wait(rlist, timeout)), [], []
        if sock.pending() and self.reader.acquire():
            return [sock], [], []  # kazoo has begun to read this: no other thread may
        self.reader.release()
        if self.queue():
            return rlist[1:], [], []  # the rest of a pipeline
        return self._idle(rlist, timeout), [], []

    def _idle(self, sources: list[Any], timeout: float | None) -> list[Any]:
        """Waits while there is neither a reply nor a request, and runs heartbeats."""
        assert self.listener is not None
        deadline = None if timeout is None else now() + timeout
        while True:
            seconds = self.listener.heartbeat()
            left = 0.0 if seconds is None else seconds
            if deadline is not None:
                left = min(left, max(0.0, deadline - now()))
            ready = self._wait_for_input(sources, left)
            if ready:
                return ready
            if seconds is None and self._is_silent(sources):
                raise TimeoutError("the server does not answer")
            if deadline is not None and now() >= deadline and not self._wait(sources, 0.0):
                return []

    def _wait_for_input(self, sources: list[Any], seconds: float) -> list[Any]:
        """The sources with input for kazoo, waiting at most so many seconds."""
        reader = self.reader
        if reader.yields():
            ready = self._wait(sources[1:], min(max(seconds, LEAST_YIELD_SECONDS), YIELD_SECONDS))
            reader.end_yield()
            return ready
        ready = self._wait(sources, seconds)
        if ready[:1] != sources[:1]:
            return ready
        if reader.acquire():
            if not reader.read():
                return ready
            reader.release()
        return ready[1:]

    def _is_silent(self, sources: list[Any]) -> bool:
        """Whether the overdue reply is really missing. A process that was stopped may find it in
        the socket, or another thread may have just read it."""
        if self._wait(sources[:1], 0.0):
            return False
        self.reader.wait_until_idle()
        assert self.listener is not None
        return self.listener.heartbeat() is None

    def _wait(self, sources: list[Any], seconds: float | None) -> list[Any]:
        if not hasattr(select, "poll"):
            return list(utils.selector_select(sources, [], [], seconds)[0])
        handles = tuple([source.fileno() for source in sources])
        poll = self._polls.get(handles)
        if poll is None:
            if len(self._polls) > 8:
                self._polls.clear()  # of connections that are gone
            poll = self._polls[handles] = select.poll()
            for handle in handles:
                poll.register(handle, select.POLLIN)
        found = poll.poll(None if seconds is None else seconds * 1000)
        return [sources[handles.index(handle)] for handle, _ in found]

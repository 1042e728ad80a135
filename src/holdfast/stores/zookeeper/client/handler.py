"""What kazoo's thread waits with and reads through: one system call where it makes five.

kazoo takes its sockets and its waiting from a handler. Its own makes a new selector for every
wait and runs callbacks on two more threads. In this one callbacks run where they arise, and the
thread's idle moments are ours: the session's heartbeat runs there. It reads what no other thread
reads: see ``zookeeper_reader``.
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
"""For another thread to read what has arrived."""
_LENGTH = struct.Struct("!i")
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SessionListener(Protocol):
    """What a session hears from kazoo's thread."""

    floor: float | None
    """The server's shortest session in seconds, once it was asked for."""

    def negotiate(self, floor: float) -> float | None:
        """Hears the shortest session; answers the one to ask for, or ``None`` to give up."""
        ...

    def connected(self, began: float, granted: float) -> None: ...
    def disconnected(self, *, ended: bool) -> None: ...

    def node_changed(self, path: str) -> None:
        """Something that was watched for; from whichever thread reads."""
        ...

    def heartbeat(self) -> float | None:
        """Seconds until it wants to be called again; ``None`` if an answer is long overdue."""
        ...


class BufferedSocket:
    """kazoo's socket, read through a buffer: one system call for all that has arrived."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.unread = b""
        """What has arrived and is left to kazoo, which reads in small pieces."""
        self.over = False
        """Whether we have ended it."""
        self._tls_pending: Callable[[], int] | None = getattr(sock, "pending", None)
        self.setblocking, self.fileno = sock.setblocking, sock.fileno
        self.close, self.getpeername = sock.close, sock.getpeername

    def pending(self) -> int:
        return len(self.unread) or (self._tls_pending() if self._tls_pending is not None else 0)

    def take(self) -> bytes | None:
        """All that has arrived, once what was left is read; ``None`` for nothing."""
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
        """Sends as much as it can without waiting."""
        try:
            return int(self._sock.send(data))
        except _WOULD_BLOCK:
            return 0

    def wait(self, deadline: float) -> None:
        """Until more can be sent."""
        left = deadline - now()
        if left <= 0:
            raise TimeoutError("the server takes no more requests")
        utils.selector_select([self._sock], [self._sock], [], min(left, 0.1))

    def shut(self) -> None:
        """Ends the connection: whoever reads finds out, whatever has still arrived."""
        self.over, self.unread = True, b""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class WakeupSocket:
    """The end of kazoo's wake-up pair that its thread reads.

    kazoo counts its bytes, and would hang for one that an interrupt has kept from being
    written. Here they are only calls: what there is to send is what is in the queue.
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
    """Callbacks run where they arise; waiting costs one system call."""

    def __init__(
        self, connect_seconds: float, tls: ssl.SSLContext | None, reader: SharedReader
    ) -> None:
        super().__init__()
        self.listener: SessionListener | None = None
        self.queue: Callable[[], Sized] = tuple
        """What kazoo has still to send."""
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
        # kazoo allows a silent host the whole session: the others would never be tried.
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
            return [], wlist, []  # a wire waits by itself when it has to
        sock = rlist[0]
        if len(rlist) == 1 or self.listener is None:
            return (rlist if sock.pending() else self._wait(rlist, timeout)), [], []
        if sock.pending() and self.reader.acquire():
            return [sock], [], []  # the rest of what it has begun to read: nobody comes in between
        self.reader.release()
        if self.queue():
            return rlist[1:], [], []  # the rest of a pipeline
        return self._idle(rlist, timeout), [], []

    def _idle(self, sources: list[Any], timeout: float | None) -> list[Any]:
        """kazoo's idle moment: neither an answer nor a request."""
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
        """What is left to kazoo, within so many seconds or sooner."""
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
        """Whether there is no answer even now. A process that was stopped finds its answers in the
        socket, or with somebody who has just read them."""
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

"""What kazoo's thread waits with and reads through: one system call where it makes five.

kazoo takes its sockets and its waiting from a handler. Its own makes a new selector for every
wait and runs callbacks on two more threads. In this one callbacks run where they arise, and the
thread's idle moments are ours: the session's heartbeat runs there.
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

from holdfast.runtimes.clock import now

__all__ = ["Handler", "Listener"]

CHUNK_BYTES = 65_536
SEND_SECONDS = 5.0
_LENGTH = struct.Struct("!i")
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Listener(Protocol):
    """What a session hears from kazoo's thread."""

    floor: float | None
    """The server's shortest session in seconds, once it was asked for."""

    def settle(self, floor: float) -> float | None:
        """Hears the shortest session; answers the one to ask for, or ``None`` to give up."""
        ...

    def connected(self, began: float, granted: float) -> None: ...
    def disconnected(self, *, ended: bool) -> None: ...

    def beat(self) -> float | None:
        """Seconds until it wants to be called again; ``None`` if an answer is long overdue."""
        ...


class Wire:
    """kazoo's socket, read through a buffer: one system call for all that has arrived."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._buffer = b""
        self._at = 0
        self._tls_pending: Callable[[], int] | None = getattr(sock, "pending", None)
        self.setblocking, self.fileno = sock.setblocking, sock.fileno
        self.close, self.getpeername = sock.close, sock.getpeername

    def pending(self) -> int:
        waiting = len(self._buffer) - self._at
        return waiting or (self._tls_pending() if self._tls_pending is not None else 0)

    def peek(self) -> bytes | None:
        """The next message, if all of it has arrived."""
        begin = self._at + _LENGTH.size
        if begin > len(self._buffer):
            return None
        end = begin + int(_LENGTH.unpack_from(self._buffer, self._at)[0])
        return None if end > len(self._buffer) else self._buffer[begin:end]

    def skip(self, message: bytes) -> None:
        """That was the next message; it has been read."""
        self._at += _LENGTH.size + len(message)

    def fill(self) -> None:
        """Reads what is there, so that kazoo need not wait for it again; an end is left to it."""
        with suppress(*_WOULD_BLOCK):
            self._buffer, self._at = self._sock.recv(CHUNK_BYTES), 0

    def recv(self, size: int) -> bytes:
        if self._at == len(self._buffer):
            self._buffer, self._at = self._sock.recv(CHUNK_BYTES), 0
        chunk = self._buffer[self._at : self._at + size]
        self._at += len(chunk)
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
        """Ends the connection: whoever reads finds out."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class Bell:
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


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """Callbacks run where they arise; waiting costs one system call."""

    def __init__(self, connect_seconds: float, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self.listener: Listener | None = None
        self.queue: Callable[[], Sized] = tuple
        """What kazoo has still to send."""
        self.read: Callable[[], bool] = lambda: False
        """Reads what has arrived; false if that is left to kazoo."""
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
        return Bell(inside), outside

    def create_connection(
        self, address: tuple[str, int], hostname: str = "", timeout: float = 0.0, **_: Any
    ) -> Wire:
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
        return Wire(sock)

    def select(
        self, rlist: list[Any], wlist: list[Any], xlist: list[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        if wlist:
            return [], wlist, []  # a wire waits by itself when it has to
        if rlist[0].pending():
            return rlist[:1], [], []
        if len(rlist) == 1 or self.listener is None:
            return self._wait(rlist, timeout), [], []
        if self.queue():
            return rlist[1:], [], []  # the rest of a pipeline
        # kazoo's idle moment: neither an answer nor a request.
        deadline = None if timeout is None else now() + timeout
        while True:
            seconds = self.listener.beat()
            left = 0.0 if seconds is None else seconds
            if deadline is not None:
                left = min(left, max(0.0, deadline - now()))
            ready = self._wait(rlist, left)
            if not ready and seconds is None:
                # Only now: a process that was stopped finds its answers in the socket.
                raise TimeoutError("the server does not answer")
            if ready == rlist[:1] and self.read():
                ready = []
            if ready or (deadline is not None and now() >= deadline):
                return ready, [], []

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
        ready = [sources[handles.index(handle)] for handle, _ in found]
        if len(sources) > 1 and sources[0] in ready:
            sources[0].fill()
        return ready

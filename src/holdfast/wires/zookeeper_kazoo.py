"""kazoo, plugged into our hands: its sockets, its waiting, its log, its handshake.

kazoo keeps the session: it connects, reconnects, authenticates and speaks the protocol on one
thread of its own. What it does around that costs more than the protocol itself (a new selector
for every wait, two more threads for callbacks), so its handler is replaced. The thread's idle
moments are ours: the session's heartbeat runs there.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped
from kazoo.handlers import utils
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, Connect

from holdfast.runtimes.clock import now

__all__ = ["Connection", "Handler", "Listener", "Quiet", "drop", "make_client", "say_goodbye"]

CHUNK_BYTES = 65_536
SEND_SECONDS = 5.0
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

    def beat(self) -> float:
        """Seconds until it wants to be called again. Raises ``OSError`` to drop a dead wire."""
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

    def recv(self, size: int) -> bytes:
        if self._at == len(self._buffer):
            self._buffer, self._at = self._sock.recv(CHUNK_BYTES), 0
        chunk = self._buffer[self._at : self._at + size]
        self._at += len(chunk)
        return chunk

    def send(self, data: bytes) -> int:
        deadline = now() + SEND_SECONDS
        while True:
            try:
                return int(self._sock.send(data))
            except _WOULD_BLOCK:
                left = deadline - now()
                if left <= 0:
                    raise TimeoutError("the server takes no more requests") from None
                utils.selector_select([self._sock], [self._sock], [], min(left, 0.1))


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """Callbacks run where they arise; waiting costs one system call."""

    def __init__(self, connect_seconds: float, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self.listener: Listener | None = None
        self._connect_seconds, self._tls = connect_seconds, tls
        self._poll: Any = None
        self._polled: tuple[int, ...] = ()

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def create_connection(
        self, address: tuple[str, int], hostname: str = "", timeout: float = 0.0, **_: Any
    ) -> Wire:
        # kazoo allows a silent host the whole session: the others would never be tried.
        seconds = min(timeout or self._connect_seconds, self._connect_seconds)
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
        # kazoo's idle moment: neither an answer nor a request.
        deadline = None if timeout is None else now() + timeout
        while True:
            seconds = self.listener.beat()
            if deadline is not None:
                seconds = min(seconds, max(0.0, deadline - now()))
            ready = self._wait(rlist, seconds)
            if ready or (deadline is not None and now() >= deadline):
                return ready, [], []

    def _wait(self, sources: list[Any], seconds: float | None) -> list[Any]:
        if not hasattr(select, "poll"):
            ready: list[Any] = utils.selector_select(sources, [], [], seconds)[0]
            return ready
        handles = tuple(source.fileno() for source in sources)
        if handles != self._polled:
            self._poll = select.poll()
            for handle in handles:
                self._poll.register(handle, select.POLLIN)
            self._polled = handles
        found = {
            handle for handle, _ in self._poll.poll(None if seconds is None else seconds * 1000)
        }
        return [source for source in sources if source.fileno() in found]


class Quiet:
    """kazoo's log. It would show credentials at its lowest level; we keep the last trouble."""

    def __init__(self) -> None:
        self.trouble = ""

    def debug(self, *_: Any) -> None:
        pass

    log = info = debug

    def warning(self, text: str, *values: Any) -> None:
        self.trouble = text % values if values else text

    warn = warning

    def exception(self, text: str, *values: Any) -> None:
        self.warning(text, *values)


class Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection, which also learns what sessions the server allows."""

    def __init__(self, client: Any, listener: Listener, **options: Any) -> None:
        super().__init__(client, client._conn_retry.copy(), **options)
        self._listener = listener

    def _connect(self, host: str, hostip: str, port: int) -> tuple[float, float]:
        floor = self._listener.floor
        if floor is None:
            floor = self._shortest_session(host, hostip, port)
        timeout = self._listener.settle(floor)
        if timeout is None:
            self.client._stopped.set()
            raise ConnectionDropped("the server does not honour this ttl")
        self.client._session_timeout = int(timeout * 1000)
        began = now()
        read_ms, connect_ms = super()._connect(host, hostip, port)
        self._listener.connected(began, read_ms * 1.5 / 1000)
        return read_ms, connect_ms

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        finally:
            self.close()  # whoever said goodbye may not have waited for it

    def _shortest_session(self, host: str, hostip: str, port: int) -> float:
        """Asks a server for a session of a millisecond, and gives it back.

        The answer is two ticks unless somebody has set it; ZooKeeper has no other way to ask.
        """
        client = self.client
        with self._socket_error_handling():
            wire = self.handler.create_connection((hostip, port), host)
        try:
            self._socket = wire
            hello = Connect(0, 0, 1, 0, b"\0" * 16, False)
            answer: Any = self._invoke(client._session_timeout / 1000, hello)
            self._submit(CloseInstance, SEND_SECONDS, 1)
            return float(answer[0].time_out) / 1000
        finally:
            self._socket = None
            wire.close()


def make_client(listener: Listener, handler: Handler, log: Quiet, **options: Any) -> KazooClient:
    """A client that has not connected yet."""
    sasl = options.pop("sasl_options", None)
    retry = {"max_tries": -1, "delay": 0.05, "max_delay": 1.0, "sleep_func": handler.sleep_func}
    client = KazooClient(handler=handler, logger=log, connection_retry=retry, **options)
    handler.listener = listener
    client._connection = Connection(client, listener, logger=log, sasl_options=sasl)
    client.add_listener(lambda state: _tell(listener, str(state)))
    return client


def _tell(listener: Listener, state: str) -> None:
    if state == "LOST":
        listener.disconnected(ended=True)
    elif state == "SUSPENDED":
        listener.disconnected(ended=False)


def say_goodbye(client: KazooClient, seconds: float) -> None:
    """Ends the session, and with it all its nodes; waits no longer than that.

    kazoo's own ``stop`` may wait for ten seconds and more while it is not connected.
    """
    if client._stopped.is_set():
        return
    connection = client._connection
    client._stopped.set()
    client._queue.append((CloseInstance, None))
    wake = connection._write_sock
    if wake is not None:
        with suppress(OSError):  # closed in this moment
            wake.send(b"\0")
    connection.connection_stopped.wait(seconds)


def drop(client: KazooClient) -> None:
    """In a forked child: closes the handles that it inherited, which the parent keeps."""
    connection = client._connection
    for wire in (connection._socket, connection._read_sock, connection._write_sock):
        if wire is not None:
            wire.close()

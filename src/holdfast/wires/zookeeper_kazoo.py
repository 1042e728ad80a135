"""kazoo, plugged into our hands: its handshake, its log, its sending and its end.

kazoo keeps the session: it connects, reconnects, authenticates and speaks the protocol on one
thread of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionClosedError, ConnectionDropped
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, Connect, ReplyHeader
from kazoo.protocol.states import KeeperState

from holdfast.runtimes.clock import now
from holdfast.wires.zookeeper_handler import SEND_SECONDS, Handler, Listener

__all__ = ["Quiet", "drop", "make_client", "say_goodbye", "submit"]

MOST_XID = 2**31 - 1
_HEAD = struct.Struct("!iii")
_ENDED = (KeeperState.AUTH_FAILED, KeeperState.CLOSED, KeeperState.EXPIRED_SESSION)


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

    _xid: int
    _socket: Any
    _read_sock: Any

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

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        """Sends all that waits in one piece; kazoo sends one request per look at its sockets."""
        client, packed = self.client, bytearray()
        self._read_sock.recv(1)
        for _ in range(len(client._queue)):
            request, answer = client._queue.popleft()
            self._xid = (self._xid % MOST_XID) + 1
            kind = request.type  # first: it decides what is sent
            body = request.serialize()
            packed += _HEAD.pack(len(body) + 8, self._xid, kind) + body
            # Before it is sent: should that fail, all that is pending is told so.
            client._pending.append((request, answer, self._xid))
        if packed:
            self._write(packed, connect_timeout)

    def _read_header(self, timeout: float) -> Any:
        message = self._socket.message()
        if message is None:
            return super()._read_header(timeout)
        header, offset = ReplyHeader.deserialize(message, 0)
        return header, message, offset

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        finally:
            self.close()  # whoever said goodbye may not have waited for it

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        # A server that hangs may still be connected to: the handshake has its own, short time.
        return super()._invoke(min(timeout, self.handler.connect_seconds), request, xid)

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
    handler.listener, handler.queue = listener, lambda: client._queue
    client._connection = Connection(client, listener, logger=log, sasl_options=sasl)
    client.add_listener(lambda state: _tell(listener, str(state)))
    return client


def _tell(listener: Listener, state: str) -> None:
    if state == "LOST":
        listener.disconnected(ended=True)
    elif state == "SUSPENDED":
        listener.disconnected(ended=False)


def submit(client: KazooClient, asks: Sequence[Any]) -> None:
    """Hands requests to kazoo's thread, which is woken once for all of them.

    kazoo's own ``_call`` wakes it for each, which costs more than to send it.
    """
    wake = client._connection._write_sock
    if client._state in _ENDED or wake is None:
        for ask in asks:
            client._call(ask.request, ask)  # tells it why not
        return
    client._queue.extend([(ask.request, ask) for ask in asks])
    try:
        wake.send(b"\0")
    except BlockingIOError:
        pass  # it has been called often enough
    except OSError:
        for ask in asks:
            ask.set_exception(ConnectionClosedError("the connection was closed"))


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

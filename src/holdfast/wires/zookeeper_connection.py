"""kazoo's connection, with its sending, its reading and its handshake made ours.

Every thread sends its own requests, behind those that wait already. kazoo would have them sent by
its thread, which costs two more system calls and a change of threads each time.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

from kazoo.exceptions import ConnectionDropped
from kazoo.protocol.connection import PING_XID, WATCH_XID, ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, Connect, Ping, ReplyHeader

from holdfast.runtimes.clock import now
from holdfast.wires.zookeeper_handler import SEND_SECONDS, Listener

__all__ = ["Connection"]

MOST_XID = 2**31 - 1
_HEAD = struct.Struct("!iii")
_REPLY = struct.Struct("!iqi")
_PING = _HEAD.pack(8, PING_XID, Ping.type)


class Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection, which also learns what sessions the server allows."""

    _xid: int
    _socket: Any
    _read_sock: Any

    def __init__(self, client: Any, listener: Listener, **options: Any) -> None:
        super().__init__(client, client._conn_retry.copy(), **options)
        self._listener = listener
        self._sending = threading.RLock()
        self._packing = False
        """Whether requests are being packed: a signal's handler may come in between."""
        self._open = False
        """Whether requests can be sent: hands were shaken, and nobody was told of a loss yet."""
        self._unsent = bytearray()
        """What the socket did not take at once."""

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
        self._unsent.clear()
        self._open = True
        self._listener.connected(began, read_ms * 1.5 / 1000)
        return read_ms, connect_ms

    # Sending

    def flush(self) -> bool:
        """Sends all that waits, from any thread; false if that is left to kazoo's thread."""
        if not self.handler.any_thread_sends:
            return False
        with self._sending:
            if not self._open or self._packing:
                return False
            try:
                self._send()
            except OSError as error:
                if error.errno is None:
                    raise  # not the socket's: an alarm's
            return not self._unsent

    def shut(self) -> None:
        """Nobody sends from here on: those whose answers are pending are about to be told."""
        with self._sending:
            self._open = False

    def _send(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        self._packing = True
        try:
            self._pack()
            if self._unsent:
                del self._unsent[: self._socket.send_now(self._unsent)]
        except BaseException:
            # There is no telling any more which answers will come. kazoo's thread finds the end
            # of the connection, and tells all who wait for one.
            self._socket.shut()
            raise
        finally:
            self._packing = False

    def _pack(self) -> None:
        queue, pending = self.client._queue, self.client._pending
        while queue:
            request, answer = queue.popleft()
            self._xid = (self._xid % MOST_XID) + 1
            kind = request.type  # first: it decides what is sent
            body = request.serialize()
            self._unsent += _HEAD.pack(len(body) + 8, self._xid, kind) + body
            # Before it is sent: should that fail, all that is pending is told so.
            pending.append((request, answer, self._xid))

    # kazoo's thread

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        self._read_sock.recv(1)
        self._send_all()

    def _send_ping(self, connect_timeout: float) -> None:
        self.ping_outstanding.set()
        with self._sending:
            self._unsent += _PING
        self._send_all()

    def _send_all(self) -> None:
        """Waits for the socket where it must; others leave theirs to this meanwhile."""
        deadline = now() + SEND_SECONDS
        while True:
            with self._sending:
                self._send()
            if not self._unsent:
                return
            self._socket.wait(deadline)

    # Reading

    def read(self) -> bool:
        """Takes in all answers that have arrived; false if there is something else, for kazoo.

        kazoo's own way around its loop, once for each answer, costs more than the answers do.
        """
        wire = self._socket
        if not wire.pending():
            return False  # the end
        message = wire.peek()
        while message is not None:
            if not self._take(message):
                return False
            message = wire.peek()
        return not wire.pending()

    def _take(self, message: bytes) -> bool:
        client = self.client
        xid, zxid, code = _REPLY.unpack_from(message)
        if xid == WATCH_XID:
            self._socket.skip(message)
            self._read_watch_event(message, _REPLY.size)
            return True
        if xid < 0 or not client._pending:
            return False
        request, answer, expected = client._pending[0]
        if request is not answer or xid != expected:
            return False
        self._socket.skip(message)
        client._pending.popleft()
        if zxid > 0:
            client.last_zxid = zxid
        watcher = getattr(request, "watcher", None)
        if watcher is not None and not code:
            client._data_watchers[request.path].add(watcher)
        request.take(code, message, _REPLY.size)
        return True

    def _read_header(self, timeout: float) -> Any:
        message = self._socket.peek()
        if message is None:
            return super()._read_header(timeout)
        self._socket.skip(message)
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

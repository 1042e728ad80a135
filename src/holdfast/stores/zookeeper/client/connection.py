"""kazoo's client and connection, with our own sending, reading and handshake.

kazoo keeps the session: it connects, reconnects and authenticates on a thread of its own. Every
thread of ours sends its own requests, behind those already queued. With kazoo's own way its thread
would send them, which costs two more system calls and a thread switch per request.
"""

from __future__ import annotations

import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionClosedError, ConnectionDropped
from kazoo.protocol.connection import PING_XID, WATCH_XID, ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, Connect, Ping
from kazoo.protocol.states import KeeperState

from holdfast.io.clock import now
from holdfast.stores.zookeeper.client.handler import SEND_SECONDS, KazooHandler, SessionListener
from holdfast.stores.zookeeper.client.packets import Request
from holdfast.stores.zookeeper.client.reader import SharedReader, is_held_by_this_thread

__all__ = [
    "KazooLog",
    "ZooKeeperClient",
    "ZooKeeperConnection",
    "close_inherited",
    "end_session",
    "make_client",
    "submit",
]

MOST_XID = 2**31 - 1
MOST_FRAME_BYTES = 64 * 2**20
"""The largest reply that is accepted: a listing of very many names."""
LEAST_ANSWER_BYTES = 16
"""The header of a reply."""
_DAMAGED = (struct.error, LookupError, RuntimeError, TypeError, ValueError)
"""What kazoo raises for data that no ZooKeeper server sends."""
_ENDED = (KeeperState.AUTH_FAILED, KeeperState.CLOSED, KeeperState.EXPIRED_SESSION)
_HEAD = struct.Struct("!iii")
_ANSWER = struct.Struct("!iiqi")
_PING = _HEAD.pack(8, PING_XID, Ping.type)


@contextmanager
def _dropped_if_damaged() -> Iterator[None]:
    """Makes a damaged reply end the connection instead of kazoo's thread."""
    try:
        yield
    except _DAMAGED as error:
        raise ConnectionDropped(f"a reply that is not ZooKeeper's ({error})") from None


def _of_socket(error: BaseException) -> bool:
    """Whether the socket failed, rather than an interrupt or an alarm was raised."""
    return isinstance(error, OSError) and error.errno is not None


class ZooKeeperConnection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection; also finds out which session timeouts the server allows."""

    _xid: int
    _socket: Any
    _read_sock: Any

    def __init__(self, client: Any, listener: SessionListener, **options: Any) -> None:
        super().__init__(client, client._conn_retry.copy(), **options)
        self._listener = listener
        self.reader: SharedReader = client.handler.reader
        self.reader.read, self.reader.wake_kazoo = self.read, self.wake
        self._sending = threading.RLock()
        self._open = False
        """Whether any thread may send: from the end of the handshake to the loss of the
        connection."""
        self._unsent = bytearray()
        """Data that the socket did not accept at once."""

    def _connect(self, host: str, hostip: str, port: int) -> tuple[float, float]:
        floor = self._listener.floor
        if floor is None:
            floor = self._shortest_session(host, hostip, port)
        timeout = self._listener.negotiate(floor)
        if timeout is None:
            self.client._stopped.set()
            raise ConnectionDropped("the server does not honour this ttl")
        self.client._session_timeout = int(timeout * 1000)
        began = now()
        read_ms, connect_ms = super()._connect(host, hostip, port)
        self._unsent.clear()
        self.reader.attach(self._socket)
        self._open = self.handler.any_thread_sends
        self._listener.connected(began, read_ms * 1.5 / 1000)
        return read_ms, connect_ms

    # Sending

    def send(self, requests: Sequence[Request]) -> bool:
        """Sends requests from any thread. False if nothing was sent, because others must be sent
        first or kazoo's thread must send them."""
        sending = self._sending
        if is_held_by_this_thread(sending):
            self._abort()
            return False
        with sending:
            if not self._open or self.client._queue or self._unsent:
                return False
            sock = self._socket
            try:
                data, pending = self._pack(requests)
                if self._sending is not sending:  # a signal handler has ended the connection
                    for request in requests:
                        request.set_exception(ConnectionDropped("a signal interrupted the sending"))
                    return True
                self.client._pending.extend(pending)
                sent = sock.send_now(data)
                if sent < len(data) and self._sending is sending:
                    self._unsent += data[sent:]
                    self.wake()
            except BaseException as error:
                sock.shut()  # see _send
                if not _of_socket(error):
                    raise
            return True

    def _abort(self) -> None:
        """In a signal handler whose own thread was sending and continues only after it: ends the
        connection, since it is unknown how much was sent."""
        self._open, self._sending = False, threading.RLock()
        sock = self._socket
        if sock is not None:
            sock.shut()
        self.wake()

    def flush(self) -> bool:
        """Sends all queued requests, from any thread; false if that is left to kazoo's thread."""
        if is_held_by_this_thread(self._sending) or self._may_be_interrupted():
            return False
        with self._sending:
            if not self._open:
                return False
            try:
                self._send()
            except OSError as error:
                if not _of_socket(error):
                    raise
            return not self._unsent

    def _may_be_interrupted(self) -> bool:
        """Whether a signal handler may use this connection while the caller does: handlers run in
        the main thread, and a handler can't await requests of the asyncio client."""
        return self.reader.shared and threading.current_thread() is threading.main_thread()

    def shut(self) -> None:
        """Stops the sending by other threads. kazoo's thread then fails the pending requests."""
        with self._sending:
            self._open = False
        self.reader.detach()

    def wake(self) -> None:
        """Wakes kazoo's thread."""
        pair = self._write_sock
        if pair is not None:
            with suppress(OSError):  # full of wake-ups already, or closed just now
                pair.send(b"\0")

    def _send(self) -> None:
        """Sends queued requests, as far as the socket accepts them."""
        try:
            self._pack_all()
            if self._unsent:
                del self._unsent[: self._socket.send_now(self._unsent)]
        except BaseException:
            # It is unknown which replies will arrive. kazoo's thread finds the connection closed,
            # and fails all pending requests.
            self._socket.shut()
            raise

    def _pack(self, requests: Sequence[Request]) -> tuple[bytes, list[tuple[Any, Any, int]]]:
        """The bytes of requests, and their records for the pending list. These are added before the
        sending: if it fails, all of them are failed."""
        pending, xid, data = [], self._xid, b""
        for request in requests:
            xid = (xid % MOST_XID) + 1
            data += request.pack(xid)
            pending.append((request, request, xid))
        self._xid = xid
        return data, pending

    def _pack_all(self) -> None:
        queue, pending = self.client._queue, self.client._pending
        while queue:
            request, answer = queue[0]
            if request is answer:
                data, packed = self._pack([request])
                pending.extend(packed)
                self._unsent += data
            else:  # kazoo's own
                xid = self._xid = (self._xid % MOST_XID) + 1
                body = request.serialize()
                self._unsent += _HEAD.pack(len(body) + 8, xid, request.type) + body
                pending.append((request, answer, xid))
            queue.popleft()

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
        """Sends all, waiting for the socket if needed; other threads queue their requests."""
        deadline = now() + SEND_SECONDS
        while True:
            with self._sending:
                self._send()
            if not self._unsent:
                return
            self._socket.wait(deadline)

    # Reading

    def read(self) -> bool:
        """Processes all replies that have arrived; false if there is something left for kazoo.

        kazoo's own loop, once per reply, costs more than the replies.
        """
        sock = self._socket
        if sock.unread:
            return False  # the rest of something long
        data = sock.take()
        if not data:
            return data is None  # another thread has read it; empty is the end
        at, size = 0, len(data)
        while at + _ANSWER.size <= size and not sock.over:
            length, xid, zxid, code = _ANSWER.unpack_from(data, at)
            if not LEAST_ANSWER_BYTES <= length <= MOST_FRAME_BYTES:
                raise ConnectionAbortedError(0, f"a reply of {length} bytes")
            end = at + length + 4
            if end > size or not self._dispatch(
                sock, xid, zxid, code, data[at + _ANSWER.size : end]
            ):
                break
            at = end
        if at < size:
            sock.unread = data[at:]
            return False
        return not sock.pending()

    def _dispatch(self, sock: Any, xid: int, zxid: int, code: int, body: bytes) -> bool:
        client = self.client
        if xid < 0:
            return self._dispatch_other(xid, body)
        try:
            first = client._pending[0]
        except IndexError:
            return False
        request, answer, expected = first
        # If a signal handler has ended the connection, the pending list is that of the next one.
        if sock.over or request is not answer or xid != expected:
            return False
        if zxid > 0:
            client.last_zxid = zxid
        request.complete(code, body)
        # Last: if an interrupt ends the connection before, this request is failed like the others.
        with suppress(ValueError):  # a signal handler has ended the connection and removed it
            client._pending.remove(first)
        return True

    def _dispatch_other(self, xid: int, body: bytes) -> bool:
        if xid == WATCH_XID:
            try:
                self._read_watch_event(body, 0)
            except (struct.error, ValueError):
                raise ConnectionAbortedError(0, "an event that is not ZooKeeper's") from None
        elif xid == PING_XID:
            self.ping_outstanding.clear()
        else:
            return False
        return True

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        # For the listener, which has our watches: kazoo keeps none of them.
        _, _, length = _HEAD.unpack_from(buffer, offset)
        offset += _HEAD.size
        if not self.client._stopped.is_set():
            self._listener.node_changed(buffer[offset : offset + length].decode())

    def _read_response(self, header: Any, buffer: bytes, offset: int) -> Any:
        if self._dispatch(self._socket, header.xid, header.zxid, header.err, buffer[offset:]):
            return None
        return super()._read_response(header, buffer, offset)

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        finally:
            self.close()  # the caller of end_session may not have waited for it
            self.reader.close()

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        # A server that hangs may still accept connections: the handshake has a short time limit.
        with _dropped_if_damaged():
            return super()._invoke(min(timeout, self.handler.connect_seconds), request, xid)

    def _read_socket(self, read_timeout: float) -> Any:
        with _dropped_if_damaged():
            return super()._read_socket(read_timeout)

    def _read(self, length: int, timeout: float) -> bytes:
        """Reads so many bytes within the timeout. kazoo would restart the timeout with every byte
        of a server that sends one at a time, and accept any announced length."""
        if not 0 <= length <= MOST_FRAME_BYTES:
            raise ConnectionDropped(f"a reply of {length} bytes")
        data, deadline = bytearray(), now() + timeout
        with self._socket_error_handling():
            while len(data) < length:
                sock, left = self._socket, deadline - now()
                if left <= 0 or not self.handler.select([sock], [], [], left)[0]:
                    raise self.handler.timeout_exception("socket time-out during read")
                with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    chunk = sock.recv(length - len(data))
                    if not chunk:
                        raise ConnectionDropped("socket connection broken")
                    data += chunk
        return bytes(data)

    def _shortest_session(self, host: str, hostip: str, port: int) -> float:
        """Requests a session of one millisecond and closes it; the server grants its minimum.

        That is two ticks unless ``minSessionTimeout`` is set. There is no other way to find out.
        """
        client = self.client
        with self._socket_error_handling():
            sock = self.handler.create_connection((hostip, port), host)
        try:
            self._socket = sock
            hello = Connect(0, 0, 1, 0, b"\0" * 16, False)
            answer: Any = self._invoke(client._session_timeout / 1000, hello)
            self._submit(CloseInstance, SEND_SECONDS, 1)
            return float(answer[0].time_out) / 1000
        finally:
            self._socket = None
            sock.close()


class KazooLog:
    """kazoo's logger. Keeps the last warning only: kazoo's debug log has credentials."""

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


class ZooKeeperClient(KazooClient):  # type: ignore[misc]
    """kazoo's client, with our connection."""

    _connection: ZooKeeperConnection

    def _session_callback(self, state: Any) -> None:
        if state != KeeperState.CONNECTED:
            self._connection.shut()
        super()._session_callback(state)


def make_client(
    listener: SessionListener, handler: KazooHandler, log: KazooLog, **options: Any
) -> ZooKeeperClient:
    """Makes a client, which is not connected yet."""
    sasl = options.pop("sasl_options", None)
    retry = {"max_tries": -1, "delay": 0.05, "max_delay": 1.0, "sleep_func": handler.sleep_func}
    client = ZooKeeperClient(handler=handler, logger=log, connection_retry=retry, **options)
    handler.listener, handler.queue = listener, lambda: client._queue
    client._connection = ZooKeeperConnection(client, listener, logger=log, sasl_options=sasl)
    client.add_listener(lambda state: _report_state(listener, str(state)))
    return client


def _report_state(listener: SessionListener, state: str) -> None:
    if state == "LOST":
        listener.disconnected(ended=True)
    elif state == "SUSPENDED":
        listener.disconnected(ended=False)


def submit(client: ZooKeeperClient, requests: Sequence[Any]) -> None:
    """Sends requests, or queues them for kazoo's thread, which is woken once for all of them."""
    connection = client._connection
    if connection.send(requests):
        return
    wake = connection._write_sock
    if client._state in _ENDED or wake is None:
        for request in requests:
            client._call(request, request)  # fails it with the reason
        return
    client._queue.extend([(request, request) for request in requests])
    if connection.flush():
        return
    try:
        wake.send(b"\0")
    except BlockingIOError:
        pass  # full of wake-ups already
    except OSError:
        for request in requests:
            request.set_exception(ConnectionClosedError("the connection was closed"))


def end_session(client: ZooKeeperClient, seconds: float) -> None:
    """Ends the session and with it all its nodes, waiting at most so many seconds.

    kazoo's own ``stop`` may wait for ten seconds and more while it is not connected.
    """
    if client._stopped.is_set():
        return
    connection = client._connection
    client._stopped.set()
    connection.reader.shared = False  # kazoo reads the last reply
    client._queue.append((CloseInstance, None))
    connection.wake()
    connection.connection_stopped.wait(seconds)


def close_inherited(client: ZooKeeperClient) -> None:
    """In a forked child: closes the inherited descriptors; the parent keeps its own."""
    connection = client._connection
    for sock in (connection._socket, connection._read_sock, connection._write_sock):
        if sock is not None:
            sock.close()
    connection.reader.close()

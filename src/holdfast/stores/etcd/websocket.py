"""The WebSocket to one host of an etcd store: its frames, and the blocking connection.

One of the waiting threads reads the blocking WebSocket for all of them (see ``io.wakeups``). The
asyncio connection is in ``aio``.
"""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import ProtocolError

from holdfast.io import http
from holdfast.io.clock import now
from holdfast.io.http import READ_BYTES, Servers, ready

__all__ = ["BlockingWebSocket", "Frames", "NoWebSocket", "open_blocking"]


class NoWebSocket(ConnectionRefusedError):
    """The server, or a proxy in between, speaks HTTP but does not support WebSockets."""


GREETING_END = b"\r\n\r\n"
WHOLE_TEXT = 0x81
"""The first byte of a frame that holds a complete text message."""
MASKED = 0x80
_HEADS = {126: 4, 127: 10}
"""Length of the head of a longer frame, by the frame's second byte."""
MOST_MESSAGE_BYTES = 16 * 2**20
PART_BYTES = 64
"""What each part of a message adds to the counted size, so that empty parts count too."""
_DAMAGED = (ProtocolError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What wsproto raises for bytes that are not valid WebSocket data."""
PONG_SECONDS = 1.0
"""How long sending the replies to pings may take."""


def _frame_end(data: bytes | bytearray) -> int:
    """Where the first frame ends; or how many bytes are needed to know that."""
    if len(data) < 2:
        return 2
    size = data[1] & ~MASKED
    head = _HEADS.get(size, 2)
    if len(data) < head:
        return head
    if size in _HEADS:
        size = int.from_bytes(data[2:head], "big")
    return head + size + (4 if data[1] & MASKED else 0)


def _text(data: bytes | bytearray) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConnectionResetError(0, "not a WebSocket (its text is not UTF-8)") from None


class Frames:
    """The protocol of one connection, without its socket."""

    def __init__(self, servers: Servers, host: int, path: str) -> None:
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self.hello = self._protocol.send(Request(host=servers.name(host), target=path))
        self.open = False
        self.replies = b""
        """Replies to pings, to be sent."""
        self._parts: list[str] = []
        self._parts_size = 0
        self._greeted = 0
        """Bytes of the greeting received so far."""
        self._rest = bytearray()
        """The start of an incomplete frame; during the handshake, the greeting's last bytes."""

    def text(self, message: str) -> bytes:
        """Encodes a message. Raises ``OSError`` if the end of the connection was read, possibly by
        another thread."""
        try:
            return self._protocol.send(TextMessage(data=message))
        except ProtocolError:
            raise ConnectionResetError(0, "the WebSocket is over") from None

    def feed(self, data: bytes) -> list[str]:
        """Takes received bytes; returns the complete messages. Raises ``OSError`` at the end of the
        connection."""
        if not data:
            return self._feed(b"")
        if not self.open:
            data = self._read_greeting(data)
        messages: list[str] = []
        rest = self._rest
        rest += data
        while (end := _frame_end(rest)) <= len(rest):
            # Nearly all messages are one frame each: those do not need wsproto.
            if rest[0] == WHOLE_TEXT and rest[1] < MASKED and not self._parts:
                messages.append(_text(rest[_HEADS.get(rest[1], 2) : end]))
            else:
                messages += self._feed(bytes(rest[:end]))
            del rest[:end]
        if end > MOST_MESSAGE_BYTES:
            raise ConnectionResetError(0, "a WebSocket message that is too long")
        return messages

    def _read_greeting(self, data: bytes) -> bytes:
        """Takes bytes of the server's greeting; returns those that follow it."""
        known = len(self._rest)
        self._greeted += len(data)
        found = (self._rest + data).find(GREETING_END)
        if found < 0:
            if self._greeted > http.MOST_HEAD_BYTES:
                raise ConnectionResetError(0, "a WebSocket greeting that is too long")
            self._rest = (self._rest + data)[1 - len(GREETING_END) :]
            self._feed(data)
            return b""
        self._rest = bytearray()
        end = found + len(GREETING_END) - known
        self._feed(data[:end])
        return data[end:]

    def _feed(self, data: bytes) -> list[str]:
        messages: list[str] = []
        try:
            self._protocol.receive_data(data or None)
            for event in self._protocol.events():
                if isinstance(event, TextMessage):
                    self._add(event.data)
                    if event.message_finished:
                        messages.append("".join(self._parts))
                        self._parts, self._parts_size = [], 0
                elif isinstance(event, AcceptConnection):
                    self.open = True
                elif isinstance(event, Ping):
                    self.replies += self._protocol.send(event.response())
                elif isinstance(event, RejectConnection):
                    raise NoWebSocket(0, f"no WebSocket (status {event.status_code})")
                elif isinstance(event, CloseConnection):
                    raise ConnectionResetError(0, "the WebSocket was closed")
        except _DAMAGED as error:
            raise ConnectionResetError(0, f"not a WebSocket ({type(error).__name__})") from None
        return messages

    def _add(self, part: str) -> None:
        self._parts.append(part)
        self._parts_size += len(part) + PART_BYTES
        if self._parts_size > MOST_MESSAGE_BYTES:
            raise ConnectionResetError(0, "a WebSocket message that is too long")


class BlockingWebSocket:
    """A WebSocket. Any thread may send; ``messages`` does not block."""

    def __init__(self, connection: http.HttpConnection, servers: Servers, path: str) -> None:
        self._connection, self._socket = connection, connection.socket
        self.host = connection.host
        self._tls = isinstance(connection.socket, ssl.SSLSocket)
        self._frames = Frames(servers, connection.host, path)
        # For reads and writes: a TLS socket does not allow both at once.
        self._mutex = threading.Lock()

    def open(self, until: float) -> None:
        """Does the handshake. Raises ``TimeoutError`` if it is not done by ``until``."""
        self._socket.settimeout(max(0.001, until - now()))
        self._socket.sendall(self._frames.hello)
        while not self._frames.open:
            left = until - now()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            self._frames.feed(self._socket.recv(READ_BYTES))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: str, until: float) -> None:
        with self._mutex:
            self._send(self._frames.text(message), until)

    def _send(self, data: bytes, until: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                left = until - now()
                if left <= 0 or not ready(self._socket, left, to_write=True):
                    raise TimeoutError from None

    def messages(self) -> list[str]:
        """Returns the messages received since the last call. Raises ``OSError`` if the connection
        is over."""
        messages: list[str] = []
        with self._mutex:
            try:
                messages += self._frames.feed(self._socket.recv(READ_BYTES))
                # A poll reports what is left in a plain socket; TLS may have buffered it.
                while self._tls:
                    messages += self._frames.feed(self._socket.recv(READ_BYTES))
            except (BlockingIOError, ssl.SSLWantReadError):
                pass
            if self._frames.replies:
                replies, self._frames.replies = self._frames.replies, b""
                self._send(replies, now() + PONG_SECONDS)
        return messages

    def shut_down(self) -> None:
        """Ends the connection, from any thread; ``messages`` raises then."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def open_blocking(servers: Servers, path: str, until: float) -> BlockingWebSocket:
    """Connects and opens a WebSocket. Raises ``BackendUnavailable``."""
    connection = http.connect(servers, until)
    try:
        web = BlockingWebSocket(connection, servers, path)
        web.open(until)
    except OSError as error:
        connection.close()
        servers.failed(connection.host)
        raise servers.unknown(connection.host, path.encode(), error) from error
    except BaseException:
        connection.close()
        raise
    return web

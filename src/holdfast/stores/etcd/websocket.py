"""A client's WebSocket to one of a store's hosts, blocking: text in, text out.

The blocking one is read without waiting by whoever listens for everybody (see ``hub``).
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
    """The server, or something before it, speaks HTTP but no WebSocket."""


GREETING_END = b"\r\n\r\n"
WHOLE_TEXT = 0x81
"""The first byte of a frame that is a whole message."""
MASKED = 0x80
_HEADS = {126: 4, 127: 10}
"""How long the head of a longer frame is, by its second byte."""
MOST_MESSAGE_BYTES = 16 * 2**20
PART_BYTES = 64
"""What a part of a message counts for, even if there is nothing in it."""
_DAMAGED = (ProtocolError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What wsproto makes of bytes that are no WebSocket's."""


def _frame_end(data: bytes | bytearray) -> int:
    """Where the first frame ends, or at least how much more there must be to tell."""
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
        raise ConnectionResetError(0, "not a WebSocket (its text is none)") from None


class Frames:
    """The protocol of one connection, without its socket."""

    def __init__(self, servers: Servers, host: int, path: str) -> None:
        self._wire = WSConnection(ConnectionType.CLIENT)
        self.hello = self._wire.send(Request(host=servers.name(host), target=path))
        self.open = False
        self.replies = b""
        """What has to be sent because of what was read."""
        self._parts: list[str] = []
        self._parts_size = 0
        self._greeted = 0
        """How many bytes of the greeting there are so far."""
        self._rest = bytearray()
        """The beginning of a frame; before, the last bytes of the greeting."""

    def text(self, message: str) -> bytes:
        """Raises ``OSError`` once the connection's end was read, which another thread may do."""
        try:
            return self._wire.send(TextMessage(data=message))
        except ProtocolError:
            raise ConnectionResetError(0, "the WebSocket is over") from None

    def feed(self, data: bytes) -> list[str]:
        """The messages that are whole now. Raises ``OSError`` at the connection's end."""
        if not data:
            return self._feed(b"")
        if not self.open:
            data = self._greet(data)
        messages: list[str] = []
        rest = self._rest
        rest += data
        while (end := _frame_end(rest)) <= len(rest):
            # Nearly all that comes is whole messages in a frame each: they need no machine.
            if rest[0] == WHOLE_TEXT and rest[1] < MASKED and not self._parts:
                messages.append(_text(rest[_HEADS.get(rest[1], 2) : end]))
            else:
                messages += self._feed(bytes(rest[:end]))
            del rest[:end]
        if end > MOST_MESSAGE_BYTES:
            raise ConnectionResetError(0, "a WebSocket message that is too long")
        return messages

    def _greet(self, data: bytes) -> bytes:
        """Takes in the server's greeting, and gives back what came behind it."""
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
            self._wire.receive_data(data or None)
            for event in self._wire.events():
                if isinstance(event, TextMessage):
                    self._add(event.data)
                    if event.message_finished:
                        messages.append("".join(self._parts))
                        self._parts, self._parts_size = [], 0
                elif isinstance(event, AcceptConnection):
                    self.open = True
                elif isinstance(event, Ping):
                    self.replies += self._wire.send(event.response())
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
    """Sends from any thread; ``messages`` never waits."""

    def __init__(self, connection: http.Connection, servers: Servers, path: str) -> None:
        self._connection, self._socket = connection, connection.socket
        self._tls = isinstance(connection.socket, ssl.SSLSocket)
        self._frames = Frames(servers, connection.host, path)
        # One at a time also for TLS, whose sockets can't be read and written at once.
        self._mutex = threading.Lock()

    def greet(self, until: float) -> None:
        """The handshake. Raises ``TimeoutError`` if it takes longer."""
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
        """What has come since. Raises ``OSError`` when the connection is over."""
        messages: list[str] = []
        with self._mutex:
            try:
                messages += self._frames.feed(self._socket.recv(READ_BYTES))
                # Whoever polls is told of what a plain socket still has; TLS may have read it.
                while self._tls:
                    messages += self._frames.feed(self._socket.recv(READ_BYTES))
            except (BlockingIOError, ssl.SSLWantReadError):
                pass
            if self._frames.replies:
                replies, self._frames.replies = self._frames.replies, b""
                self._send(replies, now() + 1.0)
        return messages

    def hang_up(self) -> None:
        """Ends the connection from any thread; ``messages`` will say so."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def open_blocking(servers: Servers, path: str, until: float) -> BlockingWebSocket:
    """Connects and greets; raises ``BackendUnavailable``."""
    connection = http.connect(servers, until)
    try:
        web = BlockingWebSocket(connection, servers, path)
        web.greet(until)
    except OSError as error:
        connection.close()
        servers.failed(connection.host)
        raise servers.unknown(connection.host, path.encode(), error) from error
    except BaseException:
        connection.close()
        raise
    return web

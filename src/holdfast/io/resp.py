"""RESP, the protocol of Redis: packs commands, and reads the replies of a server that may be broken
or hostile.

The size of a reply is checked before memory is allocated for it. A login has one deadline for all
of its reads, so a server that sends one byte at a time does not prolong it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

import hiredis

from holdfast.io.clock import now

__all__ = [
    "INCOMPLETE",
    "REPLY_DELAY",
    "BoundedStream",
    "Bounds",
    "NotResp",
    "RedisRefused",
    "ReplyReader",
    "TimedSocket",
    "bulk",
    "chunks",
    "pack",
]

LARGEST_REPLY_BYTES = 32 << 20
MOST_ELEMENTS = 1_000_000
"""Sum over all arrays of one reply."""
LARGEST_LOGIN_BYTES, MOST_LOGIN_ELEMENTS = 1 << 16, 1000
"""The same limits for the replies during a login."""
LONGEST_LINE_BYTES = 1 << 16
DEEPEST = 8
_INTEGER = ord(":")
INCOMPLETE = object()
"""What ``ReplyReader.gets`` returns while a reply is not complete."""


class NotResp(ConnectionError):
    """The peer sent something that is not RESP: another kind of server, or a damaged stream."""


class RedisRefused(Exception):
    """An error reply of the server. Its connection stays usable."""

    @property
    def code(self) -> str:
        """The first word of the reply: ``NOSCRIPT``, ``MOVED``, ``READONLY`` …"""
        return str(self).partition(" ")[0]


class Bounds:
    """Checks the headers of the replies on one connection.

    Raises ``ConnectionError`` for a reply that is too large, nested too deeply, or not RESP.
    """

    __slots__ = ("_elements", "_largest", "_line", "_most", "_open", "_payload", "_size")

    def __init__(
        self, largest: int = LARGEST_REPLY_BYTES, most_elements: int = MOST_ELEMENTS
    ) -> None:
        self._largest, self._most = largest, most_elements
        self._line = b""
        self._payload = 0
        """Bytes of the current bulk string that are not yet received."""
        self._open: list[int] = []
        """For each incomplete array, outermost first: elements that are not yet received."""
        self._size = self._elements = 0

    @property
    def between_replies(self) -> bool:
        return not (self._payload or self._open or self._line)

    def check(self, data: bytes) -> None:
        at, end = 0, len(data)
        while at < end:
            if self._payload:
                step = min(self._payload, end - at)
                at += step
                self._payload -= step
                if not self._payload:
                    self._complete()
                continue
            stop = data.find(b"\n", at) + 1
            self._line += data[at : stop or end]
            if len(self._line) > LONGEST_LINE_BYTES:
                raise ConnectionError("a line of its reply is too long")
            if not stop:
                return
            line, self._line, at = self._line, b"", stop
            self._header(line)

    def _header(self, line: bytes) -> None:
        kind = line[:1]
        if kind in b"+-:":
            self._complete()
            return
        digits = line[1:].strip()
        if kind not in b"$*" or not digits.removeprefix(b"-").isdigit() or len(digits) > 15:
            raise NotResp("it sent something that is not a reply of Redis")
        size = int(digits)
        if kind == b"$" and size >= 0:
            self._grow(size, 0)
            self._payload = size + 2
        elif kind == b"*" and size > 0:
            self._grow(0, size)
            self._open.append(size)
        else:
            self._complete()

    def _grow(self, size: int, elements: int) -> None:
        self._size += size
        self._elements += elements
        too_large = self._size > self._largest or self._elements > self._most
        if too_large or len(self._open) >= DEEPEST:
            raise ConnectionError("its reply is larger than any reply of Redis to Holdfast can be")

    def _complete(self) -> None:
        """Counts a complete reply, or a complete element of an array."""
        while self._open:
            self._open[-1] -= 1
            if self._open[-1]:
                return
            self._open.pop()
        self._size = self._elements = 0


class ReplyReader:
    """Parses replies: bytes, ints, lists, None, and ``RedisRefused`` values for error replies."""

    __slots__ = ("_bounds", "_feed", "gets")

    def __init__(self) -> None:
        reader = hiredis.Reader(
            protocolError=ConnectionError, replyError=RedisRefused, notEnoughData=INCOMPLETE
        )
        self._bounds = Bounds()
        self._feed = reader.feed
        self.gets = reader.gets

    def feed(self, data: bytes) -> None:
        """Adds received data. Raises ``ConnectionError`` if it exceeds the bounds."""
        # Most replies are a single number, which needs no check.
        bounds = self._bounds
        if data[0] != _INTEGER or data.find(b"\n") != len(data) - 1 or not bounds.between_replies:
            bounds.check(data)
        self._feed(data)


class TimedSocket:
    """The socket that redis-py reads during a login: one deadline, and bounded replies."""

    def __init__(self, sock: socket.socket, by: float) -> None:
        self.inner, self._by = sock, by
        self._bounds = Bounds(LARGEST_LOGIN_BYTES, MOST_LOGIN_ELEMENTS)

    def recv_into(self, buffer: bytearray) -> int:
        size = self._limited().recv_into(buffer)
        self._bounds.check(bytes(buffer[:size]))
        return size

    def recv(self, size: int) -> bytes:
        data = self._limited().recv(size)
        self._bounds.check(data)
        return data

    def _limited(self) -> socket.socket:
        left = self._by - now()
        if left <= 0:
            raise TimeoutError
        self.inner.settimeout(left)
        return self.inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class BoundedStream:
    """The stream that redis-py reads during an asyncio login: bounded replies.

    The caller sets the deadline, with ``asyncio.timeout``.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._bounds = Bounds(LARGEST_LOGIN_BYTES, MOST_LOGIN_ELEMENTS)

    async def read(self, size: int) -> bytes:
        data: bytes = await self._stream.read(size)
        self._bounds.check(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bulk(text: str) -> str:
    """Packs one argument as a bulk string."""
    size = len(text) if text.isascii() else len(text.encode())
    return f"${size}\r\n{text}\r\n"


def pack(*words: str | int) -> bytes:
    """Packs one command."""
    return f"*{len(words)}\r\n{''.join(bulk(str(word)) for word in words)}".encode()


REPLY_DELAY = pack("TIME")
"""A cheap command pipelined in front of a release, so that Redis publishes the wake-up before it
replies to us: Redis writes last to the client that it first had a reply for. The woken waiter then
runs while we wait for our reply. The reply to this command is dropped, whatever it is."""


def chunks(commands: Iterable[bytes], size: int) -> Iterable[list[bytes]]:
    """Splits commands into batches, so that the buffers of neither side grow without bound."""
    batch: list[bytes] = []
    for command in commands:
        batch.append(command)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch

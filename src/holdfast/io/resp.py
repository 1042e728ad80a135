"""Reading replies of a Redis server that may be broken or hostile: what it announces is bounded
before anything is kept for it, and however slowly it logs a connection in, that ends in time."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

import hiredis

from holdfast.io.clock import now

__all__ = [
    "FIRST_WORD",
    "INCOMPLETE",
    "Bounds",
    "Reader",
    "Refused",
    "TimedSocket",
    "WatchedStream",
    "bulk",
    "chunks",
    "pack",
]

LARGEST_REPLY_BYTES = 32 << 20
MOST_ELEMENTS = 1_000_000
"""Of all arrays of one reply together."""
LARGEST_LOGIN_BYTES, MOST_LOGIN_ELEMENTS = 1 << 16, 1000
"""The same for replies to a login."""
LONGEST_LINE_BYTES = 1 << 16
DEEPEST = 8
_INTEGER = ord(":")
INCOMPLETE = object()
"""What a reader answers while a reply is not all there."""


class Refused(Exception):
    """An error reply. The connection it came over is fine."""

    @property
    def code(self) -> str:
        """Its first word: ``NOSCRIPT``, ``MOVED``, ``READONLY`` …"""
        return str(self).partition(" ")[0]


class Bounds:
    """Follows the replies of a connection by their headers alone; raises ``ConnectionError`` for
    what is too large, too deep, or no reply."""

    __slots__ = ("_elements", "_largest", "_line", "_most", "_open", "_payload", "_size")

    def __init__(
        self, largest: int = LARGEST_REPLY_BYTES, most_elements: int = MOST_ELEMENTS
    ) -> None:
        self._largest, self._most = largest, most_elements
        self._line = b""
        self._payload = 0
        """How many bytes of a text are still to come."""
        self._open: list[int] = []
        """How many elements are still to come, of each array that is not complete."""
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
            raise ConnectionError("what it says is no reply of Redis")
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
            raise ConnectionError("its reply is larger than any of Redis to Holdfast can be")

    def _complete(self) -> None:
        """A reply, or an element of one, is all there."""
        while self._open:
            self._open[-1] -= 1
            if self._open[-1]:
                return
            self._open.pop()
        self._size = self._elements = 0


class Reader:
    """A parser of replies: bytes, ints, lists, None, and ``Refused`` as a value."""

    __slots__ = ("_bounds", "_feed", "gets")

    def __init__(self) -> None:
        reader = hiredis.Reader(
            protocolError=ConnectionError, replyError=Refused, notEnoughData=INCOMPLETE
        )
        self._bounds = Bounds()
        self._feed = reader.feed
        self.gets = reader.gets

    def feed(self, data: bytes) -> None:
        """Takes in what came, if it keeps within the bounds: ``ConnectionError`` otherwise."""
        # One number is the usual reply, and is not looked at any further.
        bounds = self._bounds
        if data[0] != _INTEGER or data.find(b"\n") != len(data) - 1 or not bounds.between_replies:
            bounds.check(data)
        self._feed(data)


class TimedSocket:
    """A socket as redis-py reads it while it logs in: by one deadline, and within bounds."""

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


class WatchedStream:
    """The same for its asyncio twin, which has its deadline from whoever awaits it."""

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
    """One packed argument."""
    size = len(text) if text.isascii() else len(text.encode())
    return f"${size}\r\n{text}\r\n"


def pack(*words: str | int) -> bytes:
    """One packed command."""
    return f"*{len(words)}\r\n{''.join(bulk(str(word)) for word in words)}".encode()


FIRST_WORD = pack("TIME")
"""Sent in front of a command that tells others something, so that its reply comes behind that. A
server writes last to whom it first had something to say: those who are told run while we wait,
instead of waiting while we run on. The reply to this one is dropped, whatever it is."""


def chunks(commands: Iterable[bytes], size: int) -> Iterable[list[bytes]]:
    """Commands in batches, so that neither side's buffers grow without bound."""
    batch: list[bytes] = []
    for command in commands:
        batch.append(command)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch

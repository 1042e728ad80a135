"""RESP, the protocol of Redis: packs commands, and reads the replies of a server that may be broken
or hostile. The size of a reply is checked before memory is allocated for it.
"""

from __future__ import annotations

import socket

import hiredis

from holdfast.io.connection import PENDING, Broken, Stream

__all__ = [
    "Bounds",
    "NotResp",
    "RedisRefused",
    "ReplyReader",
    "RespConnection",
    "bulk",
    "pack",
]

LARGEST_REPLY_BYTES = 32 << 20
MOST_ELEMENTS = 1_000_000
"""Sum over all arrays of one reply."""
LARGEST_GREETING_BYTES = 1 << 16
MOST_GREETING_ELEMENTS = 100
LONGEST_LINE_BYTES = 1 << 16
DEEPEST = 8
_INTEGER = ord(":")
_KINDS = b"+-:$*"
_NOT_A_REPLY = "it sent something that is not a reply of Redis"


class NotResp(Broken):
    """The first bytes of a connection are not RESP: it is another kind of server."""


class RedisRefused(Exception):
    """An error reply of the server. Its connection stays usable."""

    def __init__(self, text: str) -> None:
        # A server that does not know AUTH repeats the password.
        super().__init__(text.partition(", with args beginning")[0])

    @property
    def code(self) -> str:
        """The first word of the reply: ``NOSCRIPT``, ``MOVED``, ``READONLY`` …"""
        return str(self).partition(" ")[0]


class Bounds:
    """Checks the headers of the replies on one connection.

    Raises ``Broken`` for a reply that is too large, nested too deeply, or not RESP.
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

    def widen(self) -> None:
        """From now on replies may be as large as any."""
        self._largest, self._most = LARGEST_REPLY_BYTES, MOST_ELEMENTS

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
                raise Broken("a line of its reply is too long")
            if not stop:
                return
            line, self._line, at = self._line, b"", stop
            self._header(line)

    def _header(self, line: bytes) -> None:
        kind = line[:1]
        if kind in b"+-:":
            self._grow(len(line), 0)
            self._complete()
            return
        digits = line[1:].strip()
        if kind not in b"$*" or not digits.removeprefix(b"-").isdigit() or len(digits) > 15:
            raise Broken(_NOT_A_REPLY)
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
            raise Broken("its reply is larger than any reply of Redis to Holdfast can be")

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

    def __init__(self, bounds: Bounds) -> None:
        reader = hiredis.Reader(
            protocolError=Broken, replyError=RedisRefused, notEnoughData=PENDING
        )
        self._bounds = bounds
        self._feed = reader.feed
        self.gets = reader.gets

    def feed(self, data: bytes) -> None:
        """Adds received data. Raises ``Broken`` if it exceeds the bounds."""
        # Most replies are a single number, which needs no check.
        bounds = self._bounds
        if data[0] != _INTEGER or data.find(b"\n") != len(data) - 1 or not bounds.between_replies:
            bounds.check(data)
        self._feed(data)


class RespConnection(Stream):
    """A connection to a Redis server: requests are packed commands. Until it is ``greeted``,
    replies must be small."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        bounds = Bounds(LARGEST_GREETING_BYTES, MOST_GREETING_ELEMENTS)
        self._reader, self.greeted = ReplyReader(bounds), bounds.widen
        self.feed, self.next = self._first_feed, self._reader.gets

    def _first_feed(self, data: bytes) -> None:
        self.feed = self._reader.feed
        if data[0] not in _KINDS:
            raise NotResp(_NOT_A_REPLY)
        self._reader.feed(data)


def bulk(text: str) -> str:
    """Packs one argument as a bulk string."""
    size = len(text) if text.isascii() else len(text.encode())
    return f"${size}\r\n{text}\r\n"


def pack(*words: str | int) -> bytes:
    """Packs one command."""
    return f"*{len(words)}\r\n{''.join(bulk(str(word)) for word in words)}".encode()

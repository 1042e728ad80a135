"""The text protocol of memcached for the drivers of ``holdfast.io``; and how a server is opened.

Not the meta commands: an ``ms`` for which there is no memory deletes the item that is there. A
``cas`` leaves it.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Any, NamedTuple

from holdfast.core.queue import MICROS
from holdfast.errors import BackendUnavailable
from holdfast.io.connection import PENDING, Broken, Stream, World, exchange, open_socket

CLOCK_SECONDS = 2.0
"""How late the server's clock may be: it counts whole seconds, by a timer."""
STATS = b"stats\r\n"
LONGEST_LINE_BYTES, MOST_DIGITS, MOST_PAIRS = 4096, 8, 1_000_000
"""Of a reply: of a line, of the size of an item, of all."""
NEEDED = {
    b"evictions": (b"off", "it evicts items when its memory is full: start it with -M"),
    b"slab_reassign": (b"no", "it drops items to move memory: start it with -o no_slab_reassign"),
    b"flush_enabled": (b"no", "everybody may delete all items: start it with -F"),
    b"cas_enabled": (b"yes", "it has no compare-and-swap: start it without -C"),
}
"""Settings without which a held name might be granted again."""


class MemcachedConnection(Stream):
    """Requests are bytes. A reply is a line, or a list of pairs: (version, data) of each item,
    (name, value) of each statistic, (key, nothing) of each key in a dump."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._buffer = b""
        self._pairs: list[tuple[bytes, bytes]] = []
        self._replies: deque[Any] = deque()

    # Both are methods: a function that refers to its connection would keep it open, and its place
    # in the pool taken, until a garbage collection, if an interrupt drops the connection.
    def next(self) -> Any:
        return self._replies.popleft() if self._replies else PENDING

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._take_line():
            pass

    def _take_line(self) -> bool:
        """Takes one line, with its data, from the buffer; false if it is not complete."""
        line, found, rest = self._buffer.partition(b"\n")
        if len(line) > LONGEST_LINE_BYTES or len(self._pairs) > MOST_PAIRS:
            raise Broken("its reply is larger than any reply of memcached to Holdfast can be")
        if not found:
            return False
        word, *words = line.rstrip(b"\r").split(b" ", 4)
        if word == b"VALUE" and len(words) == 4:
            if not words[2].isdigit() or len(words[2]) > MOST_DIGITS:
                raise Broken("it sent something that is not a reply of memcached")
            size = int(words[2])
            if len(rest) < size + 2:
                return False
            self._pairs.append((words[3], rest[:size]))
            rest = rest[size + 2 :]
        elif word == b"STAT" and len(words) > 1:
            self._pairs.append((words[0], words[1]))
        elif word.startswith(b"key="):
            self._pairs.append((word[4:], b""))
        else:
            self._replies.append(self._pairs if word == b"END" else line.rstrip(b"\r"))
            self._pairs = []
        self._buffer = rest
        return True


class Reading(NamedTuple):
    """The server's clock, and when it was asked on ours."""

    sent: float
    received: float
    time: int
    """Seconds since the epoch. A timer counts them: up to two seconds late, and more if the server
    was stopped just before."""
    uptime: int

    @property
    def micros(self) -> int:
        return self.time * MICROS

    def agrees(self, earlier: Reading) -> bool:
        """Whether this clock went on like ours since an earlier reading, in the same process."""
        passed, ran = self.time - earlier.time, self.uptime - earlier.uptime
        least, most = self.sent - earlier.received, self.received - earlier.sent
        return least - CLOCK_SECONDS <= passed == ran <= most + CLOCK_SECONDS


class MemcachedEndpoint:
    """One server, as the pools of the drivers need it."""

    def __init__(self, host: str, port: int, display: str, request_seconds: float) -> None:
        self.host, self.port, self.display = host, port, display
        self.request_seconds = request_seconds

    async def open(self, world: World, until: float) -> MemcachedConnection:
        """A connection to a server that keeps what it stores. Raises ``OSError``; a final
        ``BackendUnavailable`` for a server with other settings."""
        connection = MemcachedConnection(await open_socket(world, self.host, self.port, until))
        try:
            (reply,) = await exchange(world, connection, [b"stats settings\r\n"], until)
            found = dict(reply) if type(reply) is list else {}
            if wrong := [why for name, (word, why) in NEEDED.items() if found.get(name) != word]:
                why = "; ".join(wrong) if found else "it is not memcached"
                raise BackendUnavailable(f"{self.display} can't be used: {why}", final=True)
        except BaseException:
            connection.close()
            raise
        return connection

    def failure(self, error: OSError, seconds: float) -> BackendUnavailable:
        late = isinstance(error, TimeoutError)
        why = f"no answer within {seconds:.3g} s" if late else str(error) or type(error).__name__
        return BackendUnavailable(f"{self.display} can't be reached: {why}")

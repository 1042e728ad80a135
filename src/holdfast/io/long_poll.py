"""Requests whose answers come late or never end: long polls and streams, blocking.

Every such request occupies a connection of its own, so their number is bounded; whoever finds
no room looks again by itself. All of them together are one subscription. The twin is
``http_listen_async``.
"""

from __future__ import annotations

import selectors
import ssl
import threading
from contextlib import suppress
from typing import Protocol

from holdfast.io.clock import now
from holdfast.io.http import (
    MOST_ANSWER_BYTES,
    READ_BYTES,
    Connection,
    Reply,
    Servers,
    connect,
)
from holdfast.io.wakeups import BlockingWakeupHub

__all__ = ["BlockingListening", "Call", "Listening"]

ROOM = 16
"""How many such requests a backend may have at once. Consul allows a client 200 connections."""


class Call:
    """One request that is being listened to."""

    __slots__ = ("broken", "host", "owner", "pieces", "reply", "stream")

    def __init__(self, owner: str, host: int, stream: bool) -> None:
        self.owner, self.host, self.stream = owner, host, stream
        self.reply: Reply | None = None
        self.pieces: list[bytes] = []
        """What came of an answer that has no end."""
        self.broken = False

    def add(self, pieces: list[bytes]) -> None:
        """Takes in what came. Raises ``OSError`` if nobody has read what came before."""
        self.pieces += pieces
        if sum(map(len, self.pieces)) > MOST_ANSWER_BYTES:
            raise OSError("answers more than any request asks for")


class Listening(Protocol):
    """What backends use, blocking or asyncio."""

    async def begin(
        self, owner: str, line: bytes, body: bytes, until: float, *, stream: bool = False
    ) -> Call | None:
        """Sends a request; ``None`` if there is no room. Raises ``BackendUnavailable``."""
        ...

    async def woken(self, owner: str, until: float) -> bool:
        """Whether something came for the owner, or it was nudged, by then."""
        ...

    def end(self, call: Call) -> None:
        """Nobody listens to it any more."""
        ...

    def nudge(self, owner: str) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class BlockingListening:
    """For threads: one of those who wait reads for all."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._mutex = threading.Lock()
        self._hub = BlockingWakeupHub()
        self._ear = _Ear(self._mutex)
        # Where a selector is nothing that another can wait for, everybody just looks again.
        self._possible = hasattr(self._ear.selector, "fileno")
        self._idle: list[Connection] = []
        self._closed = False

    async def begin(
        self, owner: str, line: bytes, body: bytes, until: float, *, stream: bool = False
    ) -> Call | None:
        if not self._possible or len(self._ear.calls) >= ROOM:
            return None
        connection = self._take(until)
        try:
            connection.socket.settimeout(max(0.001, until - now()))
            connection.socket.sendall(self._servers.request(connection.host, line, body))
            connection.socket.setblocking(False)
        except OSError as error:
            connection.close(reset=True)
            self._servers.failed(connection.host)
            raise self._servers.unknown(connection.host, line, error) from error
        except BaseException:
            connection.close(reset=True)
            raise
        call = Call(owner, connection.host, stream)
        with self._mutex:
            closed = self._closed
            if not closed:
                self._ear.add(call, connection)
                if self._hub.subscription is None:
                    self._hub.attach(self._ear)
        if closed:
            connection.close(reset=True)
            raise self._servers.closed()
        return call

    def _take(self, until: float) -> Connection:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if connection.host == self._servers.turn and connection.usable():
                return connection
            connection.close()
        return connect(self._servers, until)

    async def woken(self, owner: str, until: float) -> bool:
        return self._hub.wait(owner, until)

    def end(self, call: Call) -> None:
        connection = self._ear.remove(call)
        if connection is None:
            return
        lasting = connection.responses.lasting and not self._closed
        if call.reply is not None and lasting and len(self._idle) < ROOM:
            connection.idle_since = 0.0
            self._idle.append(connection)
        else:
            connection.close(reset=True)
        if call.broken:
            self._servers.failed(call.host)

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        ear, idle, hub = self._ear, self._idle, self._hub
        self._mutex, self._hub, self._idle = threading.Lock(), BlockingWakeupHub(), []
        self._ear = _Ear(self._mutex)
        hub.discard()
        ear.close()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
        self._hub.close()
        self._ear.close()
        while self._idle:
            self._idle.pop().close()


class _Ear:
    """All calls as one subscription: a selector is itself something to wait for."""

    def __init__(self, mutex: threading.Lock) -> None:
        self.selector = selectors.DefaultSelector()
        self.calls: dict[Call, Connection] = {}
        self._mutex = mutex

    def add(self, call: Call, connection: Connection) -> None:
        """Under the mutex."""
        self.calls[call] = connection
        self.selector.register(connection.socket, selectors.EVENT_READ, call)

    def remove(self, call: Call) -> Connection | None:
        with self._mutex:
            connection = self.calls.pop(call, None)
            if connection is not None:
                with suppress(KeyError, ValueError):
                    self.selector.unregister(connection.socket)
            return connection

    def fileno(self) -> int:
        return self.selector.fileno()

    def read(self) -> list[str]:
        owners: list[str] = []
        with self._mutex:
            for key, _ in self.selector.select(0):
                call: Call = key.data
                connection = self.calls.get(call)
                if connection is not None and self._hear(call, connection):
                    owners.append(call.owner)
        return owners

    def _hear(self, call: Call, connection: Connection) -> bool:
        """Reads what is there; answers whether its owner should know."""
        try:
            while call.reply is None:
                data = connection.socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError
                call.reply = connection.responses.feed(data)
                if call.stream:
                    call.add(connection.responses.pieces())
        except (BlockingIOError, ssl.SSLWantReadError):
            return bool(call.pieces)
        except OSError:
            call.broken = True
        self.selector.unregister(connection.socket)
        return True

    def close(self) -> None:
        calls, self.calls = self.calls, {}
        for connection in calls.values():
            connection.close()
        self.selector.close()

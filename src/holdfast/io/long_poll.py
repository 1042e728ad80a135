"""Requests whose responses come late (long polls), blocking.

Each such request uses a connection of its own, so their number is limited; a waiter that gets none
polls. All of them together are one subscription. The asyncio variant is ``long_poll_aio``.
"""

from __future__ import annotations

import selectors
import ssl
import threading
from contextlib import suppress
from typing import Protocol

from holdfast.io.clock import now
from holdfast.io.http import (
    READ_BYTES,
    HttpConnection,
    Reply,
    Servers,
    connect,
)
from holdfast.io.wakeups import BlockingWakeupHub

__all__ = ["BlockingLongPolls", "LongPoll", "LongPolls"]

MOST_POLLS = 16
"""How many such requests a backend may have at once. Consul allows 200 connections per client."""


class LongPoll:
    """One request whose response is pending."""

    __slots__ = ("broken", "host", "owner", "reply")

    def __init__(self, owner: str, host: int) -> None:
        self.owner, self.host = owner, host
        self.reply: Reply | None = None
        self.broken = False


class LongPolls(Protocol):
    """What backends use, blocking or asyncio."""

    async def begin(self, owner: str, line: bytes, body: bytes, until: float) -> LongPoll | None:
        """Sends a request. ``None`` if too many are pending. Raises ``BackendUnavailable``."""
        ...

    async def woken(self, owner: str, until: float) -> bool:
        """True if something was received for the owner, or it was nudged, by ``until``."""
        ...

    def end(self, poll: LongPoll) -> None:
        """Ends a request: its connection is kept for reuse, or closed."""
        ...

    def nudge(self, owner: str) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class BlockingLongPolls:
    """For threads: one of the waiting threads reads for all."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._mutex = threading.Lock()
        self._hub = BlockingWakeupHub()
        self._polling = _PollSubscription(self._mutex)
        # Where a selector has no descriptor to wait for, all waiters poll.
        self._supported = hasattr(self._polling.selector, "fileno")
        self._idle: list[HttpConnection] = []
        self._closed = False

    async def begin(self, owner: str, line: bytes, body: bytes, until: float) -> LongPoll | None:
        if not self._supported or len(self._polling.polls) >= MOST_POLLS:
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
        poll = LongPoll(owner, connection.host)
        with self._mutex:
            closed = self._closed
            if not closed:
                self._polling.add(poll, connection)
                if self._hub.subscription is None:
                    self._hub.attach(self._polling)
        if closed:
            connection.close(reset=True)
            raise self._servers.closed()
        return poll

    def _take(self, until: float) -> HttpConnection:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if connection.host == self._servers.current and connection.usable():
                return connection
            connection.close()
        return connect(self._servers, until)

    async def woken(self, owner: str, until: float) -> bool:
        return self._hub.wait(owner, until)

    def end(self, poll: LongPoll) -> None:
        connection = self._polling.remove(poll)
        if connection is None:
            return
        reusable = connection.responses.keep_alive and not self._closed
        if poll.reply is not None and reusable and len(self._idle) < MOST_POLLS:
            connection.idle_since = 0.0
            self._idle.append(connection)
        else:
            connection.close(reset=True)
        if poll.broken:
            self._servers.failed(poll.host)

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        polling, idle, hub = self._polling, self._idle, self._hub
        self._mutex, self._hub, self._idle = threading.Lock(), BlockingWakeupHub(), []
        self._polling = _PollSubscription(self._mutex)
        hub.discard()
        polling.close()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
        self._hub.close()
        self._polling.close()
        while self._idle:
            self._idle.pop().close()


class _PollSubscription:
    """All requests as one subscription: the descriptor of a selector can be waited for."""

    def __init__(self, mutex: threading.Lock) -> None:
        self.selector = selectors.DefaultSelector()
        self.polls: dict[LongPoll, HttpConnection] = {}
        self._mutex = mutex

    def add(self, poll: LongPoll, connection: HttpConnection) -> None:
        """Call with the mutex held."""
        self.polls[poll] = connection
        self.selector.register(connection.socket, selectors.EVENT_READ, poll)

    def remove(self, poll: LongPoll) -> HttpConnection | None:
        with self._mutex:
            connection = self.polls.pop(poll, None)
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
                poll: LongPoll = key.data
                connection = self.polls.get(poll)
                if connection is not None and self._receive(poll, connection):
                    owners.append(poll.owner)
        return owners

    def _receive(self, poll: LongPoll, connection: HttpConnection) -> bool:
        """Reads what is there. True if the owner must be woken."""
        try:
            while poll.reply is None:
                data = connection.socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionResetError
                poll.reply = connection.responses.feed(data)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            poll.broken = True
        self.selector.unregister(connection.socket)
        return True

    def close(self) -> None:
        polls, self.polls = self.polls, {}
        for connection in polls.values():
            connection.close()
        self.selector.close()

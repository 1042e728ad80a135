"""The blocking Redis wire: one connection per request in flight.

Nothing here ever suspends; methods are ``async`` to look like their asyncio twins.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from holdfast.io.clock import now
from holdfast.io.connection_limit import ConnectionLimit, Permit
from holdfast.io.readable import Readable, readable
from holdfast.io.resp import FIRST_WORD, INCOMPLETE, Reader, chunks
from holdfast.stores.redis.replies import LinkBroken, unreachable
from holdfast.stores.redis.url import Access, Address, Greeting

__all__ = ["BlockingLink", "BlockingPool"]

READ_SIZE = 4096
BATCH = 256


def _at_once(_: float) -> bool:
    return True  # the read itself has a timeout


class BlockingLink:
    """One open connection. Whoever gets an exception from it closes it."""

    __slots__ = (
        "_feed",
        "_gets",
        "_readable",
        "_recv",
        "_seconds",
        "_send",
        "_sock",
        "_watched",
        "address",
        "permit",
    )

    def __init__(self, access: Access, address: Address, until: float | None = None) -> None:
        self.address = address
        self.permit: Permit | None = None
        self._seconds = access.seconds_until(until)
        connection = access.blocking(address, self._seconds)
        try:
            connection.connect()
        except (RedisError, OSError) as error:
            raise unreachable(address, error, self._seconds) from error
        self._sock: socket.socket = connection._sock.inner
        connection._sock = None  # ours from here on: redis-py must not end it
        wait = readable(self._sock, access.request_seconds)
        self._watched = wait is None
        """Whether the socket's own timeout is needed."""
        self._readable: Readable = wait or _at_once
        self.limit(access.request_seconds)
        reader = Reader()
        self._feed, self._gets = reader.feed, reader.gets
        self._send, self._recv = self._sock.sendall, self._sock.recv

    def limit(self, seconds: float) -> None:
        """Sets how long a reply may take."""
        self._seconds = seconds
        if self._watched:
            self._sock.settimeout(seconds)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, packed: bytes) -> None:
        try:
            self._send(packed)
        except OSError as error:
            raise unreachable(self.address, error, self._seconds) from error

    def receive(self, by: float | None = None) -> Any:
        """The next reply, all of it by one moment; an error reply is a ``Refused``, as a value."""
        try:
            reply = self._gets()
            if reply is INCOMPLETE:
                reply = self._rest(now() + self._seconds if by is None else by)
        except (OSError, EOFError) as error:
            raise unreachable(self.address, error, self._seconds) from error
        return reply

    def _rest(self, by: float) -> Any:
        """Reads on until a reply is complete: however many reads that takes, not longer."""
        reply: Any = INCOMPLETE
        while reply is INCOMPLETE:
            left = by - now()
            if self._watched and left > 0:
                self._sock.settimeout(left)
            if left <= 0 or not self._readable(left * 1000):
                raise TimeoutError
            data = self._recv(READ_SIZE)
            if not data:
                raise EOFError("closed by the server")
            self._feed(data)
            reply = self._gets()
        self.limit(self._seconds)
        return reply

    def call(self, packed: bytes) -> Any:
        """Sends one command and reads its reply."""
        by = now() + self._seconds
        try:
            self._send(packed)
            if not self._readable(self._seconds * 1000):
                raise TimeoutError
            data = self._recv(READ_SIZE)
            if not data:
                raise EOFError("closed by the server")
            self._feed(data)
            reply = self._gets()
        except (OSError, EOFError) as error:
            raise unreachable(self.address, error, self._seconds) from error
        return self.receive(by) if reply is INCOMPLETE else reply

    def call_behind(self, packed: bytes) -> Any:
        """The same, with a reply that comes behind what the command tells others."""
        by = now() + self._seconds
        self.send(FIRST_WORD + packed)
        self.receive(by)
        return self.receive(by)

    def call_by(self, packed: bytes, until: float, seconds: float) -> Any:
        """The same, given up at ``until``; ``seconds`` is for all others."""
        self.limit(max(0.001, until - now()))
        reply = self.call(packed)
        self.limit(seconds)
        return reply

    def listen(self) -> None:
        """Turns it into a source of messages that is read without blocking."""
        self._sock.settimeout(0.0)

    def messages(self) -> list[Any]:
        """What came in, without blocking; raises when the other side is gone."""
        found = []
        try:
            while True:
                data = self._recv(READ_SIZE)
                if not data:
                    raise EOFError("closed by the server")
                self._feed(data)
                while (reply := self._gets()) is not INCOMPLETE:
                    found.append(reply)
                # Whoever polls is told of what a plain socket still has; TLS may have read it.
                if not self._watched:
                    return found
        except (BlockingIOError, ssl.SSLWantReadError):
            return found
        except (OSError, EOFError) as error:
            raise unreachable(self.address, error, self._seconds) from error

    def alive(self) -> bool:
        """Whether nothing came in unasked: an end of file, or a reply that nobody waits for."""
        if self._watched:
            return True  # TLS may have tickets to deliver; a dead one shows when it is used
        return not self._readable(0)

    def close(self) -> None:
        self._sock.close()

    def forget(self) -> None:
        """In a forked child: the connection is the parent's, only our handle on it goes."""
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())


class BlockingPool:
    """The connections to one node: a LIFO stack without a lock on the usual way."""

    def __init__(
        self, access: Access, address: Address, limit: int, greeting: Greeting | None
    ) -> None:
        self.access, self.address, self.limit = access, address, limit
        self._greeting = greeting
        self._idle: list[BlockingLink] = []
        self._connection_limit = ConnectionLimit(limit)
        self._closed = False

    async def call(self, packed: bytes, key: str = "", until: float | None = None) -> Any:
        """Sends one command, and reads its reply. ``key`` is for topologies that route by it."""
        return self.call_now(packed, until)

    def call_now(self, packed: bytes, until: float | None = None, behind: bool = False) -> Any:
        """The same without a coroutine in between; ``behind`` what the command tells others."""
        if until is not None and not self.access.in_a_hurry(until):
            until = None
        try:
            link = self._idle.pop()
        except IndexError:
            return self._fresh_call(packed, until)
        try:
            if until is not None:
                reply = self._hurried(link, packed, until)
            else:
                reply = link.call_behind(packed) if behind else link.call(packed)
        except BaseException:
            self._drop(link)
            self.reset()  # the others were open as long: they are suspect too
            raise
        self._idle.append(link)
        if self._connection_limit.waiting:
            self._notify()
        return reply

    def _hurried(self, link: BlockingLink, packed: bytes, until: float) -> Any:
        return link.call_by(packed, until, self.access.request_seconds)

    def _fresh_call(self, packed: bytes, until: float | None) -> Any:
        """Over a connection that is waited for or opened first, all in the time of one request."""
        until = now() + self.access.seconds_until(until)
        link = self._take(until)
        try:
            reply = self._hurried(link, packed, until)
        except BaseException:
            self._drop(link)
            raise
        self._give(link)
        return reply

    async def alone(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]:
        """The same as ``calls``: here every request has its connection to itself."""
        return await self.calls(commands, until)

    async def calls(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]:
        """Sends many commands at once and reads their replies, in order, all by ``until``."""
        replies: list[Any] = []
        by = now() + self.access.seconds_until(until)
        link = self._take(by)
        try:
            for batch in chunks(commands, BATCH):
                link.limit(self.access.seconds_until(by))
                link.send(b"".join(batch))
                replies += [link.receive(by) for _ in batch]
            link.limit(self.access.request_seconds)
        except BaseException:
            self._drop(link)
            self.reset()
            raise
        self._give(link)
        return replies

    def _take(self, until: float | None = None) -> BlockingLink:
        """A connection for this thread alone, waited for if all are in use."""
        deadline = time.monotonic() + self.access.seconds_until(until)
        connection_limit, permit = self._connection_limit, None
        with connection_limit.mutex:
            connection_limit.waiting += 1
            try:
                while not (link := self._pop_alive()) and not (permit := connection_limit.take()):
                    if not connection_limit.wait(deadline - time.monotonic()):
                        raise LinkBroken(
                            f"all {self.limit} connections to {self.address} are busy", closed=False
                        )
            finally:
                connection_limit.waiting -= 1
        return link or self._connect(permit, until)

    def _pop_alive(self) -> BlockingLink | None:
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:
                return None
            if link.alive():
                return link
            link.close()
            self._connection_limit.free(link.permit)
        return None

    def _connect(self, permit: Permit | None, until: float | None) -> BlockingLink:
        try:
            link = BlockingLink(self.access, self.address, until)
        except BaseException:
            self._connection_limit.free(permit)
            raise
        link.permit = permit
        try:
            if self._greeting is not None:
                link.limit(self.access.seconds_until(until))
                self._greeting.judge(link.call(self._greeting.packed))
                link.limit(self.access.request_seconds)
        except BaseException:
            self._drop(link)
            raise
        return link

    def _give(self, link: BlockingLink) -> None:
        self._idle.append(link)
        if self._connection_limit.waiting:
            self._notify()

    def _drop(self, link: BlockingLink) -> None:
        link.close()
        self._connection_limit.free(link.permit)

    def _notify(self) -> None:
        self._connection_limit.call()
        if self._closed:
            self.reset()

    def reset(self) -> None:
        """Closes what is idle: after a failure the others are suspect too."""
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:
                return
            self._drop(link)

    def forget(self) -> None:
        for link in self._idle:
            link.forget()
        self._idle = []
        self._connection_limit = ConnectionLimit(self.limit)

    async def close(self) -> None:
        self._closed = True
        with self._connection_limit.mutex:
            self._connection_limit.waiting += (
                1  # whoever gives a connection back looks up, and closes it
            )
        self.reset()

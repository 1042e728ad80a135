"""Blocking connections to Redis, and the pool of one node: one connection per request in flight.

No method suspends; some are ``async`` to have the same interface as the asyncio pool.
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
from holdfast.io.limits import ConnectionLimit, Permit
from holdfast.io.resp import INCOMPLETE, REPLY_DELAY, ReplyReader, chunks
from holdfast.io.sockets import Readable, readable
from holdfast.stores.redis.replies import RedisConnectionBroken, login_failed, unreachable
from holdfast.stores.redis.url import Access, Greeting, NodeAddress

__all__ = ["BlockingPool", "BlockingRedisConnection"]

READ_SIZE = 4096
BATCH = 256


def _at_once(_: float) -> bool:
    return True  # the read itself has a timeout


class BlockingRedisConnection:
    """One open connection. A caller that gets an exception from it must close it."""

    __slots__ = (
        "_feed",
        "_gets",
        "_readable",
        "_recv",
        "_seconds",
        "_send",
        "_sock",
        "_socket_timeout",
        "address",
        "permit",
    )

    def __init__(self, access: Access, address: NodeAddress, until: float | None = None) -> None:
        self.address = address
        self.permit: Permit | None = None
        self._seconds = access.seconds_until(until)
        try:
            connection = self._log_in(access, address)
        except (RedisError, OSError) as error:
            raise login_failed(address, error, self._seconds) from error
        self._sock: socket.socket = connection._sock.inner
        connection._sock = None  # the socket is ours from here on: redis-py must not close it
        wait = readable(self._sock, access.request_seconds)
        self._socket_timeout = wait is None
        """True if the timeout of the socket itself is needed, as with TLS."""
        self._readable: Readable = wait or _at_once
        self.limit(access.request_seconds)
        reader = ReplyReader()
        self._feed, self._gets = reader.feed, reader.gets
        self._send, self._recv = self._sock.sendall, self._sock.recv

    def _log_in(self, access: Access, address: NodeAddress) -> Any:
        by = now() + self._seconds
        connection = access.blocking(address, self._seconds)
        try:
            connection.connect()
        except RedisError as error:
            if not access.may_log_in_again(error):
                raise
            connection = access.blocking(address, access.seconds_until(by))
            connection.connect()
        return connection

    def limit(self, seconds: float) -> None:
        """Sets the timeout of a reply."""
        self._seconds = seconds
        if self._socket_timeout:
            self._sock.settimeout(seconds)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, packed: bytes) -> None:
        try:
            self._send(packed)
        except OSError as error:
            raise unreachable(self.address, error, self._seconds) from error

    def receive(self, by: float | None = None) -> Any:
        """Reads the next reply, complete by ``by``; an error reply is a ``RedisRefused`` value."""
        try:
            reply = self._gets()
            if reply is INCOMPLETE:
                reply = self._rest(now() + self._seconds if by is None else by)
        except (OSError, EOFError) as error:
            raise unreachable(self.address, error, self._seconds) from error
        return reply

    def _rest(self, by: float) -> Any:
        """Reads until a reply is complete. One deadline for all reads."""
        reply: Any = INCOMPLETE
        while reply is INCOMPLETE:
            left = by - now()
            if self._socket_timeout and left > 0:
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

    def call_delayed(self, packed: bytes) -> Any:
        """The same; the server writes the wake-ups of the command before its reply."""
        by = now() + self._seconds
        self.send(REPLY_DELAY + packed)
        self.receive(by)
        return self.receive(by)

    def call_by(self, packed: bytes, until: float, seconds: float) -> Any:
        """The same with the deadline ``until``; then restores the timeout ``seconds``."""
        self.limit(max(0.001, until - now()))
        reply = self.call(packed)
        self.limit(seconds)
        return reply

    def listen(self) -> None:
        """Makes reads non-blocking, for a connection that only receives messages."""
        self._sock.settimeout(0.0)

    def messages(self) -> list[Any]:
        """Reads the received messages without blocking. Raises if the connection is closed."""
        found = []
        try:
            while True:
                data = self._recv(READ_SIZE)
                if not data:
                    raise EOFError("closed by the server")
                self._feed(data)
                while (reply := self._gets()) is not INCOMPLETE:
                    found.append(reply)
                # A poll reports unread data of a plain socket again. TLS may hold data in its own
                # buffer, which no poll reports: read until it is empty.
                if not self._socket_timeout:
                    return found
        except (BlockingIOError, ssl.SSLWantReadError):
            return found
        except (OSError, EOFError) as error:
            raise unreachable(self.address, error, self._seconds) from error

    def is_alive(self) -> bool:
        """False if input arrived without a request: an end of file, or an unexpected reply."""
        if self._socket_timeout:
            return True  # TLS may deliver session tickets; a dead connection fails when used
        return not self._readable(0)

    def close(self) -> None:
        self._sock.close()

    def forget(self) -> None:
        """In a forked child: closes our descriptor only. The connection is the parent's."""
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())


class BlockingPool:
    """The connections to one node: a LIFO stack; the usual call takes no lock."""

    def __init__(
        self, access: Access, address: NodeAddress, limit: int, greeting: Greeting | None
    ) -> None:
        self.access, self.address, self.limit = access, address, limit
        self._greeting = greeting
        self._idle: list[BlockingRedisConnection] = []
        self._connection_limit = ConnectionLimit(limit)
        self._closed = False

    async def call(self, packed: bytes, key: str = "", until: float | None = None) -> Any:
        """Sends one command and reads its reply. ``key`` is for routes, which choose a node."""
        return self.call_now(packed, until)

    def call_now(self, packed: bytes, until: float | None = None, delayed: bool = False) -> Any:
        """The same without a coroutine. ``delayed``: the reply comes after the wake-ups of the
        command, see ``REPLY_DELAY``."""
        if until is not None and not self.access.ends_early(until):
            until = None
        try:
            connection = self._idle.pop()
        except IndexError:
            return self._call_on_new(packed, until)
        try:
            if until is not None:
                reply = self._call_by(connection, packed, until)
            else:
                reply = connection.call_delayed(packed) if delayed else connection.call(packed)
        except BaseException:
            self._drop(connection)
            self.reset()  # the other connections are as old: they may be broken too
            raise
        self._idle.append(connection)
        if self._connection_limit.waiting:
            self._notify()
        return reply

    def _call_by(self, connection: BlockingRedisConnection, packed: bytes, until: float) -> Any:
        return connection.call_by(packed, until, self.access.request_seconds)

    def _call_on_new(self, packed: bytes, until: float | None) -> Any:
        """Waits for a connection or opens one, then calls; all within the time of one request."""
        until = now() + self.access.seconds_until(until)
        connection = self._take(until)
        try:
            reply = self._call_by(connection, packed, until)
        except BaseException:
            self._drop(connection)
            raise
        self._give(connection)
        return reply

    async def alone(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]:
        """The same as ``calls``: every request has a connection of its own here."""
        return await self.calls(commands, until)

    async def calls(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]:
        """Sends many commands at once and reads their replies, in order, all by ``until``."""
        replies: list[Any] = []
        by = now() + self.access.seconds_until(until)
        connection = self._take(by)
        try:
            for batch in chunks(commands, BATCH):
                connection.limit(self.access.seconds_until(by))
                connection.send(b"".join(batch))
                replies += [connection.receive(by) for _ in batch]
            connection.limit(self.access.request_seconds)
        except BaseException:
            self._drop(connection)
            self.reset()
            raise
        self._give(connection)
        return replies

    def _take(self, until: float | None = None) -> BlockingRedisConnection:
        """A connection for this thread alone. Waits if all are in use; raises
        ``RedisConnectionBroken`` if none is free in time."""
        deadline = time.monotonic() + self.access.seconds_until(until)
        connection_limit, permit = self._connection_limit, None
        with connection_limit.mutex:
            connection_limit.waiting += 1
            try:
                while not (idle := self._pop_alive()) and not (permit := connection_limit.take()):
                    if not connection_limit.wait(deadline - time.monotonic()):
                        raise RedisConnectionBroken(
                            f"all {self.limit} connections to {self.address} are busy", closed=False
                        )
            finally:
                connection_limit.waiting -= 1
        return idle or self._connect(permit, until)

    def _pop_alive(self) -> BlockingRedisConnection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.is_alive():
                return connection
            connection.close()
            self._connection_limit.free(connection.permit)
        return None

    def _connect(self, permit: Permit | None, until: float | None) -> BlockingRedisConnection:
        try:
            connection = BlockingRedisConnection(self.access, self.address, until)
        except BaseException:
            self._connection_limit.free(permit)
            raise
        connection.permit = permit
        try:
            if self._greeting is not None:
                connection.limit(self.access.seconds_until(until))
                self._greeting.judge(connection.call(self._greeting.packed))
                connection.limit(self.access.request_seconds)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _give(self, connection: BlockingRedisConnection) -> None:
        self._idle.append(connection)
        if self._connection_limit.waiting:
            self._notify()

    def _drop(self, connection: BlockingRedisConnection) -> None:
        connection.close()
        self._connection_limit.free(connection.permit)

    def _notify(self) -> None:
        self._connection_limit.call()
        if self._closed:
            self.reset()

    def reset(self) -> None:
        """Closes the idle connections: after a failure they may be broken too."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            self._drop(connection)

    def forget(self) -> None:
        for connection in self._idle:
            connection.forget()
        self._idle = []
        self._connection_limit = ConnectionLimit(self.limit)

    async def close(self) -> None:
        self._closed = True
        with self._connection_limit.mutex:
            # From now on every returned connection calls `_notify`, which closes it.
            self._connection_limit.waiting += 1
        self.reset()

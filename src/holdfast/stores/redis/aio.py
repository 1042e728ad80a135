"""Asyncio connections to Redis, and the pool of one node: one pipelined connection for all tasks.

Replies are matched to requests in order. The reply to a cancelled request is dropped when it
arrives: a cancellation costs no connection, and the server runs later requests after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, cast

from redis.exceptions import RedisError

from holdfast.io.resp import INCOMPLETE, REPLY_DELAY, BoundedStream, ReplyReader, chunks
from holdfast.stores.redis.replies import RedisConnectionBroken, login_failed, unreachable
from holdfast.stores.redis.url import Access, Greeting, NodeAddress

__all__ = ["AsyncPool", "AsyncRedisConnection", "RedisProtocol"]

BATCH = 256
TICKS = 4
"""How often the timer checks a request before the request times out."""


class RedisProtocol(asyncio.Protocol):
    """An asyncio protocol on a connection that redis-py has opened."""

    _transport: asyncio.Transport
    _writer: asyncio.StreamWriter | None = None
    """Only kept alive: it closes the transport when it is garbage-collected."""
    _loop: asyncio.AbstractEventLoop
    _loop_end: AsyncGenerator[None, None] | None = None
    """Closes the connection when its event loop ends, see ``_until_loop_ends``."""

    async def connect(
        self, access: Access, address: NodeAddress, until: float | None = None
    ) -> None:
        """Lets redis-py connect and log in, then takes over its transport."""
        seconds = access.seconds_until(until)
        # In a task of its own: redis-py uses asyncio.wait_for, which on Python 3.11 may swallow a
        # cancellation that arrives as it ends.
        task = asyncio.ensure_future(self._log_in(access, address, seconds))
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(task)
        except BaseException as error:
            task.cancel()
            task.add_done_callback(self._give_up)
            if isinstance(error, RedisError | OSError):
                raise login_failed(address, error, seconds) from error
            raise
        assert self._writer is not None
        transport = self._writer.transport
        transport.set_protocol(self)
        self.connection_made(transport)

    async def _log_in(self, access: Access, address: NodeAddress, seconds: float) -> None:
        try:
            await self._open(access.aio(address, seconds))
        except RedisError as error:
            if not access.may_log_in_again(error):
                raise
            if self._writer is not None:
                self._writer.transport.abort()
            await self._open(access.aio(address, seconds))

    async def _open(self, connection: Any) -> None:
        dial = connection._connect

        async def dial_and_keep() -> None:
            await dial()
            self._writer = connection._writer
            connection._reader = BoundedStream(connection._reader)

        # Kept at once: redis-py forgets a transport as soon as it begins to close it.
        connection._connect = dial_and_keep
        try:
            await connection.connect()
        finally:
            connection._reader = connection._writer = None

    def _give_up(self, task: asyncio.Future[None]) -> None:
        """Closes a connection whose caller has given up."""
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller got another error
        if self._writer is not None:
            self._writer.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked by `isinstance`: the transports of uvloop derive from no class of asyncio.
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        self._loop_end = self._until_loop_ends()
        with contextlib.suppress(StopIteration):  # it runs to its `yield`, without waiting
            self._loop_end.__anext__().__await__().send(None)

    def write(self, packed: bytes) -> None:
        """Sends a command, unless the connection is closed: ``connection_lost`` follows then, and
        uvloop would raise ``RuntimeError``."""
        if not self._transport.is_closing():
            self._transport.write(packed)

    async def _until_loop_ends(self) -> AsyncGenerator[None, None]:
        """Closes the connection when its event loop ends. ``asyncio.run`` closes the asynchronous
        generators that its loop has started, but leaves sockets open, which later loops can't
        close."""
        try:
            yield
        finally:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()

    def abort(self) -> None:
        """Closes the connection at once, also if its event loop is closed."""
        loop_end, self._loop_end = self._loop_end, None
        # RuntimeError: the loop is closed, and with uvloop the socket too; or the loop is ending.
        with contextlib.suppress(RuntimeError):
            self._transport.abort()
        if loop_end is not None:
            with contextlib.suppress(RuntimeError, StopIteration):
                loop_end.aclose().__await__().send(None)

    def forget(self) -> None:
        """After the event loop was closed: closes the socket. In a forked child: leaves socket and
        selector alone, as the parent uses them too."""
        if self._loop.is_closed():
            self.abort()
            return
        _inherited.append(self)  # garbage collection would unregister the parent's socket
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, sock.fileno())
                os.close(null)


_inherited: list[RedisProtocol] = []


class AsyncRedisConnection(RedisProtocol):
    """One open connection, shared by any number of requests in flight."""

    def __init__(self, access: Access, address: NodeAddress) -> None:
        self.address = address
        self.broken: RedisConnectionBroken | None = None
        self._seconds = access.request_seconds
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._watching = False
        self._oldest: asyncio.Future[Any] | None = None
        self._ticks = 0
        reader = ReplyReader()
        self._feed, self._gets = reader.feed, reader.gets

    @classmethod
    async def open(
        cls, access: Access, address: NodeAddress, until: float | None = None
    ) -> AsyncRedisConnection:
        connection = cls(access, address)
        await connection.connect(access, address, until)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._write = self._transport.write

    def request(self, packed: bytes) -> asyncio.Future[Any]:
        """Sends one command. The future returns its reply; an error reply is a ``RedisRefused``."""
        if self.broken is not None:
            raise RedisConnectionBroken(str(self.broken), closed=self.broken.closed)
        future = self._future()
        self._waiting.append(future)
        try:
            self._write(packed)
        except RuntimeError:  # uvloop: it is closed, and `connection_lost` follows
            self._waiting.pop()
            error = unreachable(self.address, EOFError("closed by the server"), self._seconds)
            self._break(error)
            raise RedisConnectionBroken(str(error), closed=error.closed) from None
        if not self._watching:
            self._watching = True
            self._loop.call_later(self._seconds / TICKS, self._watch)
        return future

    def request_delayed(self, packed: bytes) -> asyncio.Future[Any]:
        """The same; the server writes the wake-ups of the command before its reply."""
        if self.broken is None:
            dropped = self._future()
            dropped.cancel()
            self._waiting.append(dropped)
        return self.request(REPLY_DELAY + packed)

    def data_received(self, data: bytes) -> None:
        waiting = self._waiting
        if not waiting:  # a reply without a request would be taken for the next reply
            self.close()
        try:
            self._feed(data)
            while waiting:
                reply = self._gets()
                if reply is INCOMPLETE:
                    return
                future = waiting.popleft()
                if not future.done():
                    future.set_result(reply)
        except ConnectionError as error:  # not RESP, or too large
            self._break(unreachable(self.address, error, self._seconds))

    def _watch(self) -> None:
        """One timer for all requests: checks whether the oldest request is still the same. Stops
        when no request is waiting."""
        if not self._waiting or self.broken is not None:
            self._watching, self._oldest = False, None
            return
        if self._waiting[0] is self._oldest:
            self._ticks += 1
        else:
            self._oldest, self._ticks = self._waiting[0], 0
        if self._ticks >= TICKS:
            self._break(unreachable(self.address, TimeoutError(), self._seconds))
        else:
            self._loop.call_later(self._seconds / TICKS, self._watch)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        cause = exc or EOFError("closed by the server")
        self._break(unreachable(self.address, cause, self._seconds))

    def _break(self, error: RedisConnectionBroken) -> None:
        if self.broken is not None:
            return
        self.broken = error
        self.abort()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(RedisConnectionBroken(str(error), closed=error.closed))

    def close(self) -> None:
        self._break(
            RedisConnectionBroken(
                f"the connection to redis at {self.address} is closed", closed=False
            )
        )

    def forget(self) -> None:
        self.broken = RedisConnectionBroken(
            "the connection belongs to the parent process", closed=True
        )
        super().forget()


class AsyncPool:
    """The connections to one node: a pipelined one for all requests, opened at first use and again
    after it broke, and exclusive ones for ``alone``."""

    def __init__(
        self, access: Access, address: NodeAddress, limit: int, greeting: Greeting | None
    ) -> None:
        self.access, self.address = access, address
        self._limit, self._greeting = limit, greeting
        self._connection: AsyncRedisConnection | None = None
        self._idle: list[AsyncRedisConnection] = []
        self._connecting = asyncio.Lock()
        self._exclusive = asyncio.Semaphore(limit)
        self._closed = False

    def call(self, packed: bytes, key: str = "", until: float | None = None) -> Awaitable[Any]:
        """Sends one command and returns its reply. ``key`` is for routes, which choose a node."""
        if until is not None and self.access.ends_early(until):
            return self._call_by(packed, until)
        connection = self._connection
        if connection is None or connection.broken is not None:
            return self._call_on_new(packed)
        return connection.request(packed)

    def call_delayed(self, packed: bytes) -> Awaitable[Any]:
        """The same; the reply comes after the wake-ups of the command, see ``REPLY_DELAY``."""
        connection = self._connection
        if connection is None or connection.broken is not None:
            return self._call_on_new(packed)
        return connection.request_delayed(packed)

    async def _call_by(self, packed: bytes, until: float) -> Any:
        return (await self.calls([packed], until))[0]

    async def _call_on_new(self, packed: bytes) -> Any:
        """Opens a connection, then calls; all within the time of one request."""
        return (await self.calls([packed]))[0]

    async def calls(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]:
        """Sends many commands at once and returns their replies, in order, all by ``until``."""
        if self._closed:
            return await self.alone(commands, until)
        replies: list[Any] = []
        seconds = self.access.seconds_until(until)
        try:
            async with asyncio.timeout(seconds):
                connection = await self._connect()
                for batch in chunks(commands, BATCH):
                    futures = [connection.request(command) for command in batch]
                    replies += await asyncio.gather(*futures)
        except TimeoutError as error:
            raise unreachable(self.address, error, seconds) from error
        return replies

    async def alone(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]:
        """Sends commands that block their connection, over a connection of their own."""
        seconds = self.access.seconds_until(until)
        try:
            async with asyncio.timeout(seconds):
                return await self._alone(commands)
        except TimeoutError as error:
            raise unreachable(self.address, error, seconds) from error

    async def _alone(self, commands: Sequence[bytes]) -> list[Any]:
        async with self._exclusive:
            self._idle = [idle for idle in self._idle if idle.broken is None]
            connection = self._idle.pop() if self._idle else await self._open()
            try:
                futures = [connection.request(command) for command in commands]
                replies = await asyncio.gather(*futures)
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)
            if self._closed:
                self.reset()
            return replies

    async def _connect(self) -> AsyncRedisConnection:
        async with self._connecting:
            connection = self._connection
            if connection is None or connection.broken is not None:
                connection = self._connection = await self._open()
            if self._closed:
                self.reset()  # the retry of this request gets a connection of its own
            return connection

    async def _open(self) -> AsyncRedisConnection:
        connection = await AsyncRedisConnection.open(self.access, self.address)
        try:
            if self._greeting is not None:
                self._greeting.judge(await connection.request(self._greeting.packed))
        except BaseException:
            connection.close()
            raise
        return connection

    def reset(self) -> None:
        """Closes all connections: the next request opens a new one."""
        connections, self._connection, self._idle = [self._connection, *self._idle], None, []
        for connection in connections:
            if connection is not None:
                connection.close()

    def forget(self) -> None:
        connections, self._connection, self._idle = [self._connection, *self._idle], None, []
        for connection in connections:
            if connection is not None:
                connection.forget()
        self._connecting = asyncio.Lock()
        self._exclusive = asyncio.Semaphore(self._limit)

    async def close(self) -> None:
        """Closes all connections. A later request opens one of its own and closes it at its end."""
        self._closed = True
        self.reset()

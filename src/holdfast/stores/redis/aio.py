"""The asyncio Redis wire: one pipelined connection for all tasks.

Replies are matched to requests in order. The reply to a cancelled request is dropped when it
comes, so a cancellation costs no connection, and what is sent next is ordered behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Any

from redis.exceptions import RedisError

from holdfast.io.resp import FIRST_WORD, INCOMPLETE, Reader, WatchedStream, chunks
from holdfast.stores.redis.replies import LinkBroken, unreachable
from holdfast.stores.redis.url import Access, Address, Greeting

__all__ = ["AsyncLink", "AsyncPool", "Wired"]

BATCH = 256
TICKS = 4
"""How often a request is looked at before it counts as unanswered."""


class Wired(asyncio.Protocol):
    """A protocol on a connection that redis-py has opened."""

    _transport: asyncio.Transport
    _writer: asyncio.StreamWriter | None = None
    """Kept although nothing is written to it: it closes the transport when it is collected."""

    async def wire(self, access: Access, address: Address, until: float | None = None) -> None:
        """Lets redis-py connect and log in, then takes its transport over."""
        seconds = access.seconds_until(until)
        connection = access.aio(address, seconds)
        # As a task of its own: inside, redis-py uses asyncio.wait_for, which on Python 3.11 may
        # swallow a cancellation that comes as it ends.
        opening = asyncio.ensure_future(self._open(connection))
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(opening)
        except BaseException as error:
            opening.cancel()
            opening.add_done_callback(self._give_up)
            if isinstance(error, RedisError | OSError):
                raise unreachable(address, error, seconds) from error
            raise
        assert self._writer is not None
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.set_protocol(self)
        self.connection_made(transport)

    async def _open(self, connection: Any) -> None:
        dial = connection._connect

        async def dial_and_note() -> None:
            await dial()
            self._writer = connection._writer
            connection._reader = WatchedStream(connection._reader)

        # Noted at once: redis-py forgets a transport that it has only begun to close.
        connection._connect = dial_and_note
        try:
            await connection.connect()
        finally:
            connection._reader = connection._writer = None

    def _give_up(self, opening: asyncio.Future[None]) -> None:
        """Ends a connection that nobody waits for any more."""
        if not opening.cancelled():
            opening.exception()  # seen: whoever asked has been told of something else
        if self._writer is not None:
            self._writer.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def forget(self) -> None:
        """In a forked child: socket and selector are the parent's too, so neither is told."""
        _inherited.append(self)  # collecting it would unregister the parent's socket
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, sock.fileno())
                os.close(null)


_inherited: list[Wired] = []


class AsyncLink(Wired):
    """One open connection, shared by any number of requests in flight."""

    def __init__(self, access: Access, address: Address) -> None:
        self.address = address
        self.broken: LinkBroken | None = None
        self._seconds = access.request_seconds
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._watching = False
        self._oldest: asyncio.Future[Any] | None = None
        self._ticks = 0
        reader = Reader()
        self._feed, self._gets = reader.feed, reader.gets

    @classmethod
    async def open(cls, access: Access, address: Address, until: float | None = None) -> AsyncLink:
        link = cls(access, address)
        await link.wire(access, address, until)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._write = self._transport.write

    def request(self, packed: bytes) -> asyncio.Future[Any]:
        """Sends one command; the future brings its reply, an error reply as a ``Refused``."""
        if self.broken is not None:
            raise LinkBroken(str(self.broken), closed=self.broken.closed)
        future = self._future()
        self._waiting.append(future)
        self._write(packed)
        if not self._watching:
            self._watching = True
            self._loop.call_later(self._seconds / TICKS, self._watch)
        return future

    def request_behind(self, packed: bytes) -> asyncio.Future[Any]:
        """The same, with a reply that comes behind what the command tells others."""
        if self.broken is None:
            dropped = self._future()
            dropped.cancel()
            self._waiting.append(dropped)
        return self.request(FIRST_WORD + packed)

    def data_received(self, data: bytes) -> None:
        waiting = self._waiting
        if not waiting:  # whatever it is, it would be taken for the next reply
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
        except ConnectionError as error:  # not a reply at all
            self._break(unreachable(self.address, error, self._seconds))

    def _watch(self) -> None:
        """One timer for all requests: it looks whether the oldest is still the same, and rests
        when there is none."""
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
        cause = exc or EOFError("closed by the server")
        self._break(unreachable(self.address, cause, self._seconds))

    def _break(self, error: LinkBroken) -> None:
        if self.broken is not None:
            return
        self.broken = error
        self._transport.abort()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(LinkBroken(str(error), closed=error.closed))

    def close(self) -> None:
        self._break(
            LinkBroken(f"the connection to redis at {self.address} is closed", closed=False)
        )

    def forget(self) -> None:
        self.broken = LinkBroken("it belongs to the parent process", closed=True)
        super().forget()


class AsyncPool:
    """The one connection to a node, opened when first used and again when it broke; and those
    that only ``alone`` needs."""

    def __init__(
        self, access: Access, address: Address, limit: int, greeting: Greeting | None
    ) -> None:
        self.access, self.address = access, address
        self._limit, self._greeting = limit, greeting
        self._link: AsyncLink | None = None
        self._idle: list[AsyncLink] = []
        self._opening = asyncio.Lock()
        self._lanes = asyncio.Semaphore(limit)
        self._closed = False

    def call(self, packed: bytes, key: str = "", until: float | None = None) -> Awaitable[Any]:
        """Sends one command, and brings its reply. ``key`` is for topologies that route by it."""
        if until is not None and self.access.in_a_hurry(until):
            return self._hurried_call(packed, until)
        link = self._link
        if link is None or link.broken is not None:
            return self._fresh_call(packed)
        return link.request(packed)

    def call_behind(self, packed: bytes) -> Awaitable[Any]:
        """The same, with a reply that comes behind what the command tells others."""
        link = self._link
        if link is None or link.broken is not None:
            return self._fresh_call(packed)
        return link.request_behind(packed)

    async def _hurried_call(self, packed: bytes, until: float) -> Any:
        return (await self.calls([packed], until))[0]

    async def _fresh_call(self, packed: bytes) -> Any:
        """Over a connection that is opened for it first, all in the time of one request."""
        return (await self.calls([packed]))[0]

    async def calls(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]:
        """Sends many commands at once and brings their replies, in order, all by ``until``."""
        if self._closed:
            return await self.alone(commands, until)
        replies: list[Any] = []
        seconds = self.access.seconds_until(until)
        try:
            async with asyncio.timeout(seconds):
                link = await self._connect()
                for batch in chunks(commands, BATCH):
                    futures = [link.request(command) for command in batch]
                    replies += await asyncio.gather(*futures)
        except TimeoutError as error:
            raise unreachable(self.address, error, seconds) from error
        return replies

    async def alone(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]:
        """Sends commands that block their connection, so over one that nobody else uses."""
        seconds = self.access.seconds_until(until)
        try:
            async with asyncio.timeout(seconds):
                return await self._alone(commands)
        except TimeoutError as error:
            raise unreachable(self.address, error, seconds) from error

    async def _alone(self, commands: Sequence[bytes]) -> list[Any]:
        async with self._lanes:
            self._idle = [idle for idle in self._idle if idle.broken is None]
            link = self._idle.pop() if self._idle else await self._open()
            try:
                futures = [link.request(command) for command in commands]
                replies = await asyncio.gather(*futures)
            except BaseException:
                link.close()
                raise
            self._idle.append(link)
            if self._closed:
                self.reset()
            return replies

    async def _connect(self) -> AsyncLink:
        async with self._opening:
            link = self._link
            if link is None or link.broken is not None:
                link = self._link = await self._open()
            if self._closed:
                self.reset()  # it is asked for again, and then has a connection to itself
            return link

    async def _open(self) -> AsyncLink:
        link = await AsyncLink.open(self.access, self.address)
        try:
            if self._greeting is not None:
                self._greeting.judge(await link.request(self._greeting.packed))
        except BaseException:
            link.close()
            raise
        return link

    def reset(self) -> None:
        """Closes all connections: the next request opens another."""
        links, self._link, self._idle = [self._link, *self._idle], None, []
        for link in links:
            if link is not None:
                link.close()

    def forget(self) -> None:
        links, self._link, self._idle = [self._link, *self._idle], None, []
        for link in links:
            if link is not None:
                link.forget()
        self._opening = asyncio.Lock()
        self._lanes = asyncio.Semaphore(self._limit)

    async def close(self) -> None:
        """Closes all connections: what is asked for after that has one to itself, until then."""
        self._closed = True
        self.reset()

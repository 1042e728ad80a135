"""Watches over one WebSocket, asyncio: the twins of ``wakeups.BlockingWatches`` and
``websocket.BlockingWebSocket``. Here, so that a blocking client loads no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from holdfast.io import http_aio as http_async
from holdfast.io.clock import now
from holdfast.io.http import Servers
from holdfast.io.http_aio import abandon_transport
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub
from holdfast.stores.etcd.wakeups import PATH, Book, Watch
from holdfast.stores.etcd.websocket import MOST_MESSAGE_BYTES, Frames

__all__ = ["AsyncWatches", "AsyncWebSocket", "open_async"]


class AsyncWatches:
    """For tasks of one loop."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._hub = AsyncWakeupHub()
        self._web: AsyncWebSocket | None = None
        self._book = Book()
        self._opening = asyncio.Lock()
        self._closed = False

    async def begin(self, owner: str, keys: str, ends_only: bool, until: float) -> Watch:
        web = await self._ready(until)
        watch, request = self._book.create(owner, keys, ends_only)
        web.send(request)
        return watch

    def hung(self, session: str) -> Watch | None:
        return None if self._web is None or self._web.over else self._book.hung(session)

    async def subscription(
        self, session: str, keys: str, live: Collection[str], until: float
    ) -> Watch:
        web = await self._ready(until)
        watch, requests = self._book.subscription(session, keys, live)
        for request in requests:
            web.send(request)
        return watch

    async def _ready(self, until: float) -> AsyncWebSocket:
        async with self._opening:  # many begin to wait at once: one of them opens it for all
            if not self._closed and (self._web is None or self._web.over):
                await self._open(until)
        if self._closed or self._web is None:
            raise self._servers.closed()
        return self._web

    async def _open(self, until: float) -> None:
        web = await open_async(self._servers, PATH, until)
        if self._closed:
            web.close()
            return
        book = self._book = Book()
        self._web = web
        web.heard = lambda message: self._heard(book, message)
        web.lost = lambda: self._lost(book)

    def _heard(self, book: Book, message: str) -> None:
        self._wake(book.heard(message))

    def _lost(self, book: Book) -> None:
        self._wake(book.broke())

    def _wake(self, owners: list[str]) -> None:
        for owner in owners:
            if owner == EVERYBODY:
                self._hub.wake_all()
            else:
                self._hub.wake(owner)

    async def woken(self, owner: str, until: float) -> bool:
        return await self._hub.wait(owner, until)

    async def end(self, watch: Watch) -> None:
        request = "" if watch.broken else self._book.cancel(watch)
        if self._web is not None and request:
            self._web.send(request)

    def distrust(self) -> None:
        if self._web is not None:
            self._web.transport.abort()

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        web, self._web = self._web, None
        self._hub, self._book = AsyncWakeupHub(), Book()
        self._opening = asyncio.Lock()
        if web is not None:
            abandon_transport(web.transport)

    def close(self) -> None:
        self._closed = True
        web, self._web = self._web, None
        if web is not None:
            web.close()
        self._hub.wake_all()


class AsyncWebSocket(asyncio.Protocol):
    """Calls ``heard`` with every message and ``lost`` once at the end."""

    transport: asyncio.Transport

    def __init__(self, path: str, servers: Servers, host: int) -> None:
        self.host = host
        self._frames = Frames(servers, host, path)
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard: Callable[[str], None] = lambda message: None
        self.lost: Callable[[], None] = lambda: None
        self.over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._frames.hello)

    def data_received(self, data: bytes) -> None:
        try:
            self._hear(data)
        except OSError as error:
            self._end(error)
            self.transport.abort()

    def _hear(self, data: bytes) -> None:
        messages = self._frames.feed(data)
        if self._frames.replies:
            replies, self._frames.replies = self._frames.replies, b""
            self.transport.write(replies)
            if self.transport.get_write_buffer_size() > MOST_MESSAGE_BYTES:
                raise ConnectionResetError(0, "a server that asks and reads no answer")
        if self._frames.open and not self.greeted.done():
            self.greeted.set_result(None)
        for message in messages:
            self.heard(message)

    def connection_lost(self, exc: Exception | None) -> None:
        lost = exc if isinstance(exc, OSError) else None
        self._end(lost or ConnectionResetError(0, "the connection was closed"))

    def _end(self, error: OSError) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(error)
        if not self.over:
            self.over = True
            self.lost()

    def send(self, message: str) -> None:
        if not self.over:
            self.transport.write(self._frames.text(message))

    def close(self) -> None:
        self.over = True
        self.transport.abort()


async def open_async(servers: Servers, path: str, until: float) -> AsyncWebSocket:
    """Connects and greets; raises ``BackendUnavailable``."""
    make = partial(AsyncWebSocket, path)
    web = await http_async.connect(servers, until, make)
    try:
        async with asyncio.timeout(max(0.0, until - now())):
            await web.greeted
    except BaseException as error:
        web.close()
        if not isinstance(error, OSError):
            raise
        servers.failed(web.host)
        raise servers.unknown(web.host, path.encode(), error) from error
    return web

"""Watches and the WebSocket of ``etcd://`` for asyncio.

The counterparts of ``wakeups.BlockingWatches`` and ``websocket.BlockingWebSocket``. A module of its
own, so that a blocking client does not load asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from holdfast.io import http_aio
from holdfast.io.clock import now
from holdfast.io.http import Servers
from holdfast.io.http_aio import ConnectionBase
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub
from holdfast.stores.etcd.wakeups import PATH, Watch, WatchTable
from holdfast.stores.etcd.websocket import MOST_MESSAGE_BYTES, Frames

__all__ = ["AsyncWatches", "AsyncWebSocket", "open_async"]


class AsyncWatches:
    """Watches for the tasks of one event loop."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._hub = AsyncWakeupHub()
        self._web: AsyncWebSocket | None = None
        self._table = WatchTable()
        self._lock = asyncio.Lock()
        self._closed = False

    async def begin(self, owner: str, keys: str, ends_only: bool, until: float) -> Watch:
        web = await self._ready(until)
        watch, request = self._table.create(owner, keys, ends_only)
        web.send(request)
        return watch

    def subscribed(self, session: str) -> Watch | None:
        return None if self._unusable() else self._table.subscribed(session)

    def _unusable(self) -> bool:
        """True if there is no connection, or requests have left its host since: a node without a
        leader confirms watches and never reports an event."""
        web = self._web
        return web is None or web.over or web.host != self._servers.current

    async def subscribe(
        self, session: str, keys: str, live: Collection[str], until: float
    ) -> Watch:
        web = await self._ready(until)
        watch, requests = self._table.subscribe(session, keys, live)
        for request in requests:
            web.send(request)
        return watch

    async def _ready(self, until: float) -> AsyncWebSocket:
        async with self._lock:  # one of many new waiters opens it for all
            if not self._closed and self._unusable():
                await self._open(until)
        if self._closed or self._web is None:
            raise self._servers.closed()
        return self._web

    async def _open(self, until: float) -> None:
        web = await open_async(self._servers, PATH, until)
        if self._closed:
            web.close()
            return
        if self._web is not None and not self._web.over:
            self._web.close()
            self._lost(self._table)
        table = self._table = WatchTable()
        self._web = web
        web.on_message = lambda message: self._received(table, message)
        web.on_lost = lambda: self._lost(table)

    def _received(self, table: WatchTable, message: str) -> None:
        self._wake(table.received(message))

    def _lost(self, table: WatchTable) -> None:
        self._wake(table.fail_all())

    def _wake(self, owners: list[str]) -> None:
        for owner in owners:
            if owner == EVERYBODY:
                self._hub.wake_all()
            else:
                self._hub.wake(owner)

    async def woken(self, owner: str, until: float) -> bool:
        return await self._hub.wait(owner, until)

    async def end(self, watch: Watch) -> None:
        request = "" if watch.broken else self._table.cancel(watch)
        if self._web is not None and request:
            self._web.send(request)

    def reset_connection(self) -> None:
        if self._web is not None:
            self._web.transport.abort()

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        web, self._web = self._web, None
        self._hub, self._table = AsyncWakeupHub(), WatchTable()
        self._lock = asyncio.Lock()
        if web is not None:
            web.close()

    def close(self) -> None:
        self._closed = True
        web, self._web = self._web, None
        if web is not None:
            web.close()
        self._hub.wake_all()


class AsyncWebSocket(ConnectionBase):
    """Calls ``on_message`` with every message, and ``on_lost`` once when the connection ends."""

    def __init__(self, path: str, servers: Servers, host: int) -> None:
        super().__init__(host)
        self._frames = Frames(servers, host, path)
        self.opened: asyncio.Future[None] = self.loop.create_future()
        self.on_message: Callable[[str], None] = lambda message: None
        self.on_lost: Callable[[], None] = lambda: None
        self.over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(self._frames.hello)

    def data_received(self, data: bytes) -> None:
        try:
            self._receive(data)
        except OSError as error:
            self._end(error)
            self.transport.abort()

    def _receive(self, data: bytes) -> None:
        messages = self._frames.feed(data)
        if self._frames.replies:
            replies, self._frames.replies = self._frames.replies, b""
            self.write(replies)
            if self.transport.get_write_buffer_size() > MOST_MESSAGE_BYTES:
                raise ConnectionResetError(
                    0, "the server sends pings and does not read the replies"
                )
        if self._frames.open and not self.opened.done():
            self.opened.set_result(None)
        for message in messages:
            self.on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        lost = exc if isinstance(exc, OSError) else None
        self._end(lost or ConnectionResetError(0, "the connection was closed"))

    def _end(self, error: OSError) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
        if not self.over:
            self.over = True
            self.on_lost()

    def send(self, message: str) -> None:
        if not self.over:
            self.write(self._frames.text(message))

    def close(self) -> None:
        self.over = True
        super().close()


async def open_async(servers: Servers, path: str, until: float) -> AsyncWebSocket:
    """Connects and opens a WebSocket. Raises ``BackendUnavailable``."""
    make = partial(AsyncWebSocket, path)
    web = await http_aio.connect(servers, until, make)
    try:
        async with asyncio.timeout(max(0.0, until - now())):
            await web.opened
    except BaseException as error:
        web.close()
        if not isinstance(error, OSError):
            raise
        servers.failed(web.host)
        raise servers.unknown(web.host, path.encode(), error) from error
    return web

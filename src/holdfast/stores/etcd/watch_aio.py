"""Watches of many keys over one WebSocket, asyncio: the twin of ``etcd_watch``."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from holdfast.io.http import Servers
from holdfast.io.http_aio import abandon_transport
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub
from holdfast.stores.etcd.watch import PATH, Book, Watch
from holdfast.stores.etcd.websocket_aio import AsyncWebSocket, open_async

__all__ = ["AsyncWatches"]


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

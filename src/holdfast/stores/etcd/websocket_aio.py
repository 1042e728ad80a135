"""A client's WebSocket, asyncio: the twin of ``websocket``. Calls back with what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from holdfast.io import http_aio as http_async
from holdfast.io.clock import now
from holdfast.io.http import Servers
from holdfast.stores.etcd.websocket import MOST_MESSAGE_BYTES, Frames

__all__ = ["AsyncWebSocket", "open_async"]


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

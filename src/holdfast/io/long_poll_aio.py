"""Requests whose answers come late or never end, asyncio: the twin of ``http_listen``."""

from __future__ import annotations

from holdfast.io.http import Servers
from holdfast.io.http_aio import AsyncConnection, abandon_transport, connect
from holdfast.io.long_poll import ROOM, Call
from holdfast.io.wakeups import AsyncWakeupHub

__all__ = ["AsyncListening"]


class ListeningConnection(AsyncConnection):
    """Passes on what it hears as it comes."""

    __slots__ = ("call", "hub")

    def __init__(self, servers: Servers, host: int) -> None:
        super().__init__(servers, host)
        self.call: Call | None = None
        self.hub: AsyncWakeupHub | None = None

    def data_received(self, data: bytes) -> None:
        call = self.call
        if call is None:
            self.transport.abort()  # nobody asked
            return
        try:
            call.reply = self.responses.feed(data)
            if call.stream:
                call.add(self.responses.pieces())
        except OSError as error:
            self.fail(error)
            self.transport.abort()
            return
        if call.reply is not None or call.pieces:
            self._wake(call)

    def fail(self, error: OSError) -> None:
        if self.call is not None and not self.call.broken:
            self.call.broken = True
            self._wake(self.call)

    def _wake(self, call: Call) -> None:
        if self.hub is not None:
            self.hub.wake(call.owner)


class AsyncListening:
    """For tasks of one loop."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._hub = AsyncWakeupHub()
        self._idle: list[ListeningConnection] = []
        self._calls: dict[Call, ListeningConnection] = {}
        self._opening = 0
        self._closed = False

    async def begin(
        self, owner: str, line: bytes, body: bytes, until: float, *, stream: bool = False
    ) -> Call | None:
        if len(self._calls) + self._opening >= ROOM:
            return None
        self._opening += 1
        try:
            connection = await self._take(until)
        finally:
            self._opening -= 1
        if self._closed:
            connection.close()
            raise self._servers.closed()
        call = Call(owner, connection.host, stream)
        connection.call, connection.hub = call, self._hub
        self._calls[call] = connection
        connection.transport.write(self._servers.request(connection.host, line, body))
        return call

    async def _take(self, until: float) -> ListeningConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.host == self._servers.turn and not connection.transport.is_closing():
                return connection
            connection.close()
        return await connect(self._servers, until, ListeningConnection)

    async def woken(self, owner: str, until: float) -> bool:
        return await self._hub.wait(owner, until)

    def end(self, call: Call) -> None:
        connection = self._calls.pop(call, None)
        if connection is None:
            return
        connection.call = None
        lasting = connection.responses.lasting and not self._closed
        if call.reply is not None and lasting and not call.broken:
            self._idle.append(connection)
        else:
            connection.close()
        if call.broken:
            self._servers.failed(call.host)

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        inherited = [*self._idle, *self._calls.values()]
        self._idle, self._calls, self._hub = [], {}, AsyncWakeupHub()
        self._opening = 0
        for connection in inherited:
            abandon_transport(connection.transport)

    def close(self) -> None:
        self._closed = True
        for connection in (*self._idle, *self._calls.values()):
            connection.call = None
            connection.close()
        self._idle, self._calls = [], {}
        self._hub.wake_all()

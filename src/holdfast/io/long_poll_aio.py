"""Requests whose responses come late, asyncio: the variant of ``long_poll``."""

from __future__ import annotations

from holdfast.io.http import Servers
from holdfast.io.http_aio import AsyncConnection, connect
from holdfast.io.long_poll import MOST_POLLS, LongPoll
from holdfast.io.wakeups import AsyncWakeupHub

__all__ = ["AsyncLongPolls"]


class LongPollConnection(AsyncConnection):
    """Wakes the owner of its request when data is received."""

    __slots__ = ("hub", "poll")

    def __init__(self, servers: Servers, host: int) -> None:
        super().__init__(servers, host)
        self.poll: LongPoll | None = None
        self.hub: AsyncWakeupHub | None = None

    def data_received(self, data: bytes) -> None:
        poll = self.poll
        if poll is None:
            self.transport.abort()  # no request is pending
            return
        try:
            poll.reply = self.responses.feed(data)
        except OSError as error:
            self.fail(error)
            self.transport.abort()
            return
        if poll.reply is not None:
            self._wake(poll)

    def fail(self, error: OSError) -> None:
        if self.poll is not None and not self.poll.broken:
            self.poll.broken = True
            self._wake(self.poll)

    def _wake(self, poll: LongPoll) -> None:
        if self.hub is not None:
            self.hub.wake(poll.owner)


class AsyncLongPolls:
    """For the tasks of one loop."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._hub = AsyncWakeupHub()
        self._idle: list[LongPollConnection] = []
        self._polls: dict[LongPoll, LongPollConnection] = {}
        self._connecting = 0
        self._closed = False

    async def begin(self, owner: str, line: bytes, body: bytes, until: float) -> LongPoll | None:
        if len(self._polls) + self._connecting >= MOST_POLLS:
            return None
        self._connecting += 1
        try:
            connection = await self._take(until)
        finally:
            self._connecting -= 1
        if self._closed:
            connection.close()
            raise self._servers.closed()
        poll = LongPoll(owner, connection.host)
        connection.poll, connection.hub = poll, self._hub
        self._polls[poll] = connection
        connection.write(self._servers.request(connection.host, line, body))
        return poll

    async def _take(self, until: float) -> LongPollConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.host == self._servers.current and connection.usable():
                return connection
            connection.close()
        return await connect(self._servers, until, LongPollConnection)

    async def woken(self, owner: str, until: float) -> bool:
        return await self._hub.wait(owner, until)

    def end(self, poll: LongPoll) -> None:
        connection = self._polls.pop(poll, None)
        if connection is None:
            return
        connection.poll = None
        reusable = connection.responses.keep_alive and not self._closed
        if poll.reply is not None and reusable and not poll.broken:
            self._idle.append(connection)
        else:
            connection.close()
        if poll.broken:
            self._servers.failed(poll.host)

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        inherited = [*self._idle, *self._polls.values()]
        self._idle, self._polls, self._hub = [], {}, AsyncWakeupHub()
        self._connecting = 0
        for connection in inherited:
            connection.close()

    def close(self) -> None:
        self._closed = True
        for connection in (*self._idle, *self._polls.values()):
            connection.poll = None
            connection.close()
        self._idle, self._polls = [], {}
        self._hub.wake_all()

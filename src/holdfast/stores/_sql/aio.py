"""The asyncio wire to MySQL or PostgreSQL: a few connections, shared by the tasks of one loop.

A request whose caller was cancelled is read to its end all the same, so that its connection
can be used again, and so that what undoes it can be sent behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Connection, Dial, Refused
from holdfast.stores._sql.in_thread import in_thread

__all__ = ["AsyncWire"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class _Line(Generic[Request, Answer]):
    """A connection on the loop: one request at a time."""

    __slots__ = ("connection", "fileno", "future", "landed", "loop", "timer", "wire")

    def __init__(
        self, connection: Connection[Request, Answer], wire: AsyncWire[Request, Answer]
    ) -> None:
        self.connection, self.wire = connection, wire
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Answer] | None = None
        self.landed: asyncio.Future[None] | None = None
        """Set when the request of a caller who was cancelled has been answered, or failed."""
        self.timer: asyncio.TimerHandle | None = None
        connection.unblock()
        self.fileno = connection.fileno()
        self.loop.add_reader(self.fileno, self._readable)

    def request(self, request: Request, seconds: float) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = self.loop.create_future()
        self.future = future
        self.timer = self.loop.call_later(seconds, self._too_late)
        try:
            self.connection.send(request)
            self._flush()
        except BackendUnavailable as error:
            self._fail(error)
        return future

    def _flush(self) -> None:
        """Sends what is left to send, now or when there is room again."""
        try:
            gone = self.connection.flush()
        except BackendUnavailable as error:
            self._fail(error)
            return
        if not gone:
            self.loop.add_writer(self.fileno, self._flush)
        else:
            self.loop.remove_writer(self.fileno)

    def _readable(self) -> None:
        if self.future is None:  # nothing was asked: the session ended
            self._fail(self.connection.broken("it was closed"))
            return
        try:
            answer = self.connection.collect()
            if answer is None:
                return
            result: Answer | Refused = self.connection.given(answer)
        except Refused as error:
            result = error
        except BackendUnavailable as error:
            self._fail(error)
            return
        self._settle(result)

    def _too_late(self) -> None:
        self._fail(self.connection.broken("no answer in time"))

    def _fail(self, error: BackendUnavailable) -> None:
        self.end()
        self._settle(error)

    def _settle(self, result: Answer | BackendUnavailable) -> None:
        future, self.future = self.future, None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.wire.back(self)
        if self.landed is not None:
            self.landed.set_result(None)
            self.landed = None
        if future is None or future.done():
            return
        if isinstance(result, BackendUnavailable):
            future.set_exception(result)
        else:
            future.set_result(result)

    def end(self) -> None:
        """Right when it broke: the loop must not keep the number of a socket that is closed."""
        if self.fileno >= 0 and not self.loop.is_closed():
            self.loop.remove_reader(self.fileno)
            self.loop.remove_writer(self.fileno)
        self.fileno = -1
        self.connection.close()


class AsyncWire(Generic[Request, Answer]):
    """Belongs to the event loop that first uses it, until ``forget`` or ``close``."""

    def __init__(
        self, dial: Dial[Connection[Request, Answer]], limit: int, seconds: float, display: str
    ) -> None:
        self._dial, self._limit, self._seconds, self._display = dial, limit, seconds, display
        self._reset()

    def _reset(self) -> None:
        self._idle: list[_Line[Request, Answer]] = []
        self._all: set[_Line[Request, Answer]] = set()
        self._opening = 0
        self._starved: deque[asyncio.Future[None]] = deque()
        self._orphans: dict[str, asyncio.Future[None]] = {}
        self._closed = False

    async def request(
        self, request: Request, owner: str = "", until: float | None = None
    ) -> Answer:
        """One request, behind those of the same owner whose callers were cancelled."""
        if self._orphans and owner in self._orphans:
            await asyncio.shield(self._orphans[owner])
        by = now() + self._seconds
        if until is not None and until < by:
            by = until
        line = self._idle.pop() if self._idle else await self._borrow(by)
        future = line.request(request, by - now())
        try:
            return await future
        except asyncio.CancelledError:
            if owner and line.future is future:
                self._orphans[owner] = line.landed = line.loop.create_future()
                line.landed.add_done_callback(lambda _: self._orphans.pop(owner, None))
            raise

    async def _borrow(self, until: float) -> _Line[Request, Answer]:
        try:
            async with asyncio.timeout(until - now()):
                while not self._idle and len(self._all) + self._opening >= self._limit:
                    await self._room()
        except TimeoutError:
            raise BackendUnavailable(
                f"{self._display}: all {self._limit} connections are busy"
            ) from None
        return self._idle.pop() if self._idle else await self._open(until)

    async def _room(self) -> None:
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._starved.append(room)
        try:
            await room
        except asyncio.CancelledError:
            if not room.cancelled():
                self._wake()  # it was meant for somebody who can use it
            raise

    async def _open(self, until: float) -> _Line[Request, Answer]:
        self._opening += 1
        try:
            connection = await in_thread(lambda: self._dial(until), lambda made: made.close())
            line = _Line(connection, self)
            if not self._closed:
                self._all.add(line)
            return line
        finally:
            self._opening -= 1
            self._wake()

    def _wake(self) -> None:
        while self._starved:
            room = self._starved.popleft()
            if not room.done():
                room.set_result(None)
                return

    def back(self, line: _Line[Request, Answer]) -> None:
        """A connection that is no longer in use, or no longer open."""
        if line.connection.open and line in self._all:
            self._idle.append(line)
        else:
            self._all.discard(line)
            if line in self._idle:
                self._idle.remove(line)
            line.end()
        if self._starved:
            self._wake()

    def forget(self) -> None:
        """In a forked child: the connections and the loop are the parent's."""
        inherited = self._all
        self._reset()
        for line in inherited:
            line.connection.forget()

    async def close(self) -> None:
        """Closes what is idle now, and what is in use, or opened later, when it comes back."""
        self._closed = True
        self._all.clear()
        while self._idle:
            self._idle.pop().end()

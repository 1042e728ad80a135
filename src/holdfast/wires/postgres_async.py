"""The asyncio wire to PostgreSQL: a few connections, shared by the tasks of one loop.

A request whose caller was cancelled is read to its end all the same, so that its connection
can be used again, and so that what undoes it can be sent behind it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from psycopg import Error as PsycopgError
from psycopg.pq.abc import PGresult

from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.wires.postgres import Connection, Dial, Refused
from holdfast.wires.postgres_statement import Statement

__all__ = ["AsyncWire", "in_thread"]

T = TypeVar("T")


class _Line:
    """A connection on the loop: one request at a time."""

    __slots__ = ("connection", "fileno", "future", "landed", "loop", "timer", "wire")

    def __init__(self, connection: Connection, wire: AsyncWire) -> None:
        self.connection, self.wire = connection, wire
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[PGresult] | None = None
        self.landed: asyncio.Future[None] | None = None
        """Set when the request of a caller who was cancelled has been answered, or failed."""
        self.timer: asyncio.TimerHandle | None = None
        connection.pgconn.nonblocking = 1
        self.fileno = connection.fileno()
        self.loop.add_reader(self.fileno, self._readable)

    def request(
        self, statement: Statement, parameters: Sequence[bytes | None], seconds: float
    ) -> asyncio.Future[PGresult]:
        future = self.future = self.loop.create_future()
        self.timer = self.loop.call_later(seconds, self._too_late)
        try:
            self.connection.send(statement, parameters)
            self._flush()
        except BackendUnavailable as error:
            self._fail(error)
        return future

    def _flush(self) -> None:
        """Sends what is left to send, now or when there is room again."""
        try:
            left = self.connection.pgconn.flush()
        except PsycopgError as error:
            self._fail(self.connection.broken(str(error)))
            return
        if left:
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
            result: PGresult | Refused = self.connection.checked(answer)
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

    def _settle(self, result: PGresult | BackendUnavailable) -> None:
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


class AsyncWire:
    """Belongs to the event loop that first uses it, until ``forget`` or ``close``."""

    def __init__(self, dial: Dial, limit: int, seconds: float, display: str) -> None:
        self._dial, self._limit, self._seconds, self._display = dial, limit, seconds, display
        self._reset()

    def _reset(self) -> None:
        self._idle: list[_Line] = []
        self._all: set[_Line] = set()
        self._opening = 0
        self._starved: deque[asyncio.Future[None]] = deque()
        self._orphans: dict[str, asyncio.Future[None]] = {}

    async def request(
        self,
        statement: Statement,
        parameters: Sequence[bytes | None],
        owner: str = "",
        until: float | None = None,
    ) -> PGresult:
        """One request, behind those of the same owner whose callers were cancelled."""
        if self._orphans and owner in self._orphans:
            await asyncio.shield(self._orphans[owner])
        by = now() + self._seconds
        if until is not None and until < by:
            by = until
        line = self._idle.pop() if self._idle else await self._borrow(by)
        future = line.request(statement, parameters, by - now())
        try:
            return await future
        except asyncio.CancelledError:
            if owner and line.future is future:
                self._orphans[owner] = line.landed = line.loop.create_future()
                line.landed.add_done_callback(lambda _: self._orphans.pop(owner, None))
            raise

    async def _borrow(self, until: float) -> _Line:
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

    async def _open(self, until: float) -> _Line:
        self._opening += 1
        try:
            connection = await in_thread(lambda: self._dial(until), Connection.close)
            line = _Line(connection, self)
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

    def back(self, line: _Line) -> None:
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
        """Closes what is idle now, and what is in use when it comes back."""
        self._all.clear()
        while self._idle:
            self._idle.pop().end()


async def in_thread(work: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Runs blocking work on a thread of its own; a result that nobody waits for is undone.

    Not the loop's executor: that may be full of the program's own work, waiting for us.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            if error is None:
                undo(result)  # type: ignore[arg-type]
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as failure:  # noqa: BLE001 - it is raised on the loop
            error = failure
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed
            if error is None:
                undo(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name="holdfast-dial", daemon=True).start()
    return await future

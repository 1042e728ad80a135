"""The pool of an asyncio client: a few connections, shared by the tasks of one event loop.

The answer of a request whose caller was cancelled is still read to its end. The connection can
then be used again, and a request that undoes the cancelled one is sent after it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Dial, SqlConnection, SqlRefused

__all__ = ["AsyncSqlPool", "in_thread", "no_readers"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
T = TypeVar("T")


async def in_thread(work: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Runs blocking work on a thread of its own and returns its result. If the caller was
    cancelled before the end, ``undo`` gets the result.

    The loop's executor is not used: it may be full of the program's own work, waiting for us.
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
        except BaseException as failure:  # noqa: BLE001 - raised on the loop
            error = failure
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed
            if error is None:
                undo(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name="holdfast-dial", daemon=True).start()
    return await future


def no_readers(connection: SqlConnection[Any, Any]) -> BackendUnavailable:
    """The error for a loop that can't watch sockets, as the default one of Windows can't."""
    loop = type(asyncio.get_running_loop()).__name__
    return BackendUnavailable(
        f"{connection.server}: the asyncio client of this store needs a loop with add_reader, "
        f"which {loop} has not: use asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)",
        final=True,
    )


class _PooledConnection(Generic[Request, Answer]):
    """A connection of the pool. Carries one request at a time."""

    __slots__ = ("answered", "connection", "fileno", "future", "loop", "pool", "timer")

    def __init__(
        self, connection: SqlConnection[Request, Answer], pool: AsyncSqlPool[Request, Answer]
    ) -> None:
        self.connection, self.pool = connection, pool
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Answer] | None = None
        self.answered: asyncio.Future[None] | None = None
        """Set when the request of a cancelled caller was answered or has failed."""
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
        """Sends the bytes that are left, now or when the socket is writable again."""
        try:
            sent = self.connection.flush()
        except BackendUnavailable as error:
            self._fail(error)
            return
        if not sent:
            self.loop.add_writer(self.fileno, self._flush)
        else:
            self.loop.remove_writer(self.fileno)

    def _readable(self) -> None:
        if self.future is None:  # no request is pending: the session ended
            self._fail(self.connection.broken("it was closed"))
            return
        try:
            answer = self.connection.collect()
            if answer is None:
                return
            result: Answer | SqlRefused = self.connection.for_caller(answer)
        except SqlRefused as error:
            result = error
        except BackendUnavailable as error:
            self._fail(error)
            return
        self._finish(result)

    def _too_late(self) -> None:
        self._fail(self.connection.broken("no answer in time"))

    def _fail(self, error: BackendUnavailable) -> None:
        self.end()
        self._finish(error)

    def _finish(self, result: Answer | BackendUnavailable) -> None:
        future, self.future = self.future, None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.pool.give_back(self)
        if self.answered is not None:
            self.answered.set_result(None)
            self.answered = None
        if future is None or future.done():
            return
        if isinstance(result, BackendUnavailable):
            future.set_exception(result)
        else:
            future.set_result(result)

    def end(self) -> None:
        """Closes the connection. The loop forgets the descriptor first, as it may be reused."""
        if self.fileno >= 0 and not self.loop.is_closed():
            self.loop.remove_reader(self.fileno)
            self.loop.remove_writer(self.fileno)
        self.fileno = -1
        self.connection.close()


class AsyncSqlPool(Generic[Request, Answer]):
    """Belongs to the event loop that first uses it, until ``forget`` or ``close``."""

    def __init__(
        self, dial: Dial[SqlConnection[Request, Answer]], limit: int, seconds: float, display: str
    ) -> None:
        self._dial, self._limit, self._seconds, self._display = dial, limit, seconds, display
        self._reset()

    def _reset(self) -> None:
        self._idle: list[_PooledConnection[Request, Answer]] = []
        self._all: set[_PooledConnection[Request, Answer]] = set()
        self._opening = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._cancelled: dict[str, asyncio.Future[None]] = {}
        """By owner: done when the request of a cancelled caller was answered."""
        self._closed = False

    async def request(
        self, request: Request, owner: str = "", until: float | None = None
    ) -> Answer:
        """Sends one request, after the cancelled ones of the same owner, and returns its answer."""
        if self._cancelled and owner in self._cancelled:
            await asyncio.shield(self._cancelled[owner])
        by = now() + self._seconds
        if until is not None and until < by:
            by = until
        pooled = self._take_idle() or await self._borrow(by)
        future = pooled.request(request, by - now())
        try:
            return await future
        except asyncio.CancelledError:
            if owner and pooled.future is future:
                self._cancelled[owner] = pooled.answered = pooled.loop.create_future()
                pooled.answered.add_done_callback(lambda _: self._cancelled.pop(owner, None))
            raise

    async def _borrow(self, until: float) -> _PooledConnection[Request, Answer]:
        try:
            async with asyncio.timeout(until - now()):
                while not self._idle and len(self._all) + self._opening >= self._limit:
                    await self._await_capacity()
        except TimeoutError:
            raise BackendUnavailable(
                f"{self._display}: all {self._limit} connections are busy"
            ) from None
        return self._take_idle() or await self._open(until)

    def _take_idle(self) -> _PooledConnection[Request, Answer] | None:
        """Returns an idle connection whose session has not ended. The loop may not have noticed
        an end that came while it stood still."""
        while self._idle:
            pooled = self._idle.pop()
            if not pooled.connection.has_input():
                return pooled
            self._all.discard(pooled)
            pooled.end()
        return None

    async def _await_capacity(self) -> None:
        capacity: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(capacity)
        try:
            await capacity
        except asyncio.CancelledError:
            if not capacity.cancelled():
                self._wake()  # pass the wake-up on to a task that can use it
            raise

    async def _open(self, until: float) -> _PooledConnection[Request, Answer]:
        self._opening += 1
        try:
            connection = await in_thread(lambda: self._dial(until), lambda made: made.close())
            try:
                pooled = _PooledConnection(connection, self)
            except NotImplementedError:
                connection.close()
                raise no_readers(connection) from None
            if not self._closed:
                self._all.add(pooled)
            return pooled
        finally:
            self._opening -= 1
            self._wake()

    def _wake(self) -> None:
        while self._waiting:
            capacity = self._waiting.popleft()
            if not capacity.done():
                capacity.set_result(None)
                return

    def give_back(self, pooled: _PooledConnection[Request, Answer]) -> None:
        """Takes a connection back after use; drops it if it is closed."""
        if pooled.connection.open and pooled in self._all:
            self._idle.append(pooled)
        else:
            self._all.discard(pooled)
            if pooled in self._idle:
                self._idle.remove(pooled)
            pooled.end()
        if self._waiting:
            self._wake()

    def forget(self) -> None:
        """In a forked child the connections and the loop are the parent's. In a later loop of the
        same process the connections of the loop before are closed."""
        inherited = self._all
        self._reset()
        for pooled in inherited:
            pooled.connection.leave(pooled.loop.is_closed())

    async def close(self) -> None:
        """Closes the idle connections now, and the others when they are returned."""
        self._closed = True
        self._all.clear()
        while self._idle:
            self._idle.pop().end()

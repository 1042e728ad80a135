"""The pool of a blocking client: a few connections to MySQL or PostgreSQL, for many threads."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Dial, SqlConnection

__all__ = ["BlockingSqlPool", "SharedConnection"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Request_contra = TypeVar("Request_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)


class SharedConnection(Protocol[Request_contra, Answer_co]):
    """A connection outside the pool that takes requests while it is not otherwise in use."""

    def request(self, request: Request_contra, until: float) -> Answer_co | None:
        """Returns the answer, or None if the connection is in use at the moment."""
        ...


class BlockingSqlPool(Generic[Request, Answer]):
    """Idle connections are a stack without a lock: the one used last is used next."""

    def __init__(
        self, dial: Dial[SqlConnection[Request, Answer]], limit: int, seconds: float, display: str
    ) -> None:
        self._dial, self._limit, self._seconds, self._display = dial, limit, seconds, display
        self._reset()

    def _reset(self) -> None:
        self._idle: list[SqlConnection[Request, Answer]] = []
        # Weak: a connection lost by an interrupt between two lines is closed by its destructor.
        self._all: WeakSet[SqlConnection[Request, Answer]] = WeakSet()
        self._home = self._ours = object()
        """A connection is kept after use if its ``home`` is ``_home``; ``close`` replaces that."""
        self._opening = 0
        self._waiting = 0
        self.shared: SharedConnection[Request, Answer] | None = None
        """Gets a request first, before the pool's own connections."""
        # Always enter the RLock, not the condition: ``Condition.__enter__`` is Python code, and an
        # interrupt in there leaves it locked for ever.
        self._mutex = threading.RLock()
        self._returned = threading.Condition(self._mutex)

    async def request(
        self, request: Request, owner: str = "", until: float | None = None
    ) -> Answer:
        """Returns the answer, or raises ``BackendUnavailable`` by the deadline."""
        deadline = now() + self._seconds
        if until is not None and until < deadline:
            deadline = until
        if self.shared is not None:
            answer = self.shared.request(request, deadline)
            if answer is not None:
                return answer
        try:
            connection = self._idle.pop()
            if connection.has_input():  # the server has ended the session
                connection.close()
                connection = self._borrow(deadline)
        except IndexError:
            connection = self._borrow(deadline)
        try:
            return connection.request(request, deadline)
        finally:
            self._give_back(connection)

    def _borrow(self, until: float) -> SqlConnection[Request, Answer]:
        """Returns a live idle connection, a new one, or the first that another thread returns."""
        with self._mutex:
            self._waiting += 1
            try:
                while self._idle:
                    connection = self._idle.pop()
                    if not connection.has_input():
                        return connection
                    self._all.discard(connection)
                    connection.close()
                self._await_capacity(until)
                if self._idle:
                    return self._idle.pop()
                self._opening += 1
            finally:
                self._waiting -= 1
        try:
            connection = self._dial(until)
            connection.home = self._ours
            self._all.add(connection)
            return connection
        finally:
            with self._mutex:
                self._opening -= 1
                self._returned.notify()

    def _await_capacity(self, until: float) -> None:
        while not self._idle and self._count() >= self._limit:
            if not self._returned.wait(max(0.0, until - now())):
                raise BackendUnavailable(f"{self._display}: all {self._limit} connections are busy")

    def _count(self) -> int:
        return self._opening + sum(connection.open for connection in list(self._all))

    def _give_back(self, connection: SqlConnection[Request, Answer]) -> None:
        if connection.open and connection.home is self._home:
            self._idle.append(connection)
        else:
            connection.close()
        if self._waiting:
            with self._mutex:
                self._returned.notify()

    def detach(self) -> SqlConnection[Request, Answer] | None:
        """Removes an idle connection from the pool for good and returns it; None if all are in
        use. It no longer counts against the limit."""
        try:
            connection = self._idle.pop()
        except IndexError:
            return None
        self._all.discard(connection)
        return connection

    def forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        inherited = list(self._all)
        self._reset()
        for connection in inherited:
            connection.forget()

    async def close(self) -> None:
        """Closes the idle connections now, and the others when they are returned."""
        self._home = object()
        while self._idle:
            self._idle.pop().close()

"""The blocking wire to MySQL or PostgreSQL: a few connections, shared by many threads."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Connection, Dial

__all__ = ["BlockingWire", "Shared"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Request_contra = TypeVar("Request_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)


class Shared(Protocol[Request_contra, Answer_co]):
    """A connection that has something else to do, too."""

    def request(self, request: Request_contra, until: float) -> Answer_co | None:
        """The answer, or nothing if it has something else to do just now."""
        ...


class BlockingWire(Generic[Request, Answer]):
    """Idle connections are a stack without a lock: the one used last is used next."""

    def __init__(
        self, dial: Dial[Connection[Request, Answer]], limit: int, seconds: float, display: str
    ) -> None:
        self._dial, self._limit, self._seconds, self._display = dial, limit, seconds, display
        self._reset()

    def _reset(self) -> None:
        self._idle: list[Connection[Request, Answer]] = []
        # Weak: an interrupt between two lines may lose one, which then closes by itself.
        self._all: WeakSet[Connection[Request, Answer]] = WeakSet()
        self._home = self._ours = object()
        """Where connections come back to, and where ours are from: nowhere after ``close``."""
        self._opening = 0
        self._starved = 0
        self.shared: Shared[Request, Answer] | None = None
        """One that is asked first, if it has the time."""
        # Entered directly: the condition's own way in is Python code, and an interrupt in there
        # leaves it locked for ever.
        self._mutex = threading.RLock()
        self._returned = threading.Condition(self._mutex)

    async def request(
        self, request: Request, owner: str = "", until: float | None = None
    ) -> Answer:
        """One request, answered or raised in time."""
        deadline = now() + self._seconds
        if until is not None and until < deadline:
            deadline = until
        if self.shared is not None:
            answer = self.shared.request(request, deadline)
            if answer is not None:
                return answer
        try:
            connection = self._idle.pop()
            if connection.stirs():  # the server has ended it meanwhile
                connection.close()
                connection = self._borrow(deadline)
        except IndexError:
            connection = self._borrow(deadline)
        try:
            return connection.request(request, deadline)
        finally:
            self._give_back(connection)

    def _borrow(self, until: float) -> Connection[Request, Answer]:
        """An idle connection that still stands, or a new one, or whichever comes back first."""
        with self._mutex:
            self._starved += 1
            try:
                while self._idle:
                    connection = self._idle.pop()
                    if not connection.stirs():
                        return connection
                    self._all.discard(connection)
                    connection.close()
                self._await_room(until)
                if self._idle:
                    return self._idle.pop()
                self._opening += 1
            finally:
                self._starved -= 1
        try:
            connection = self._dial(until)
            connection.home = self._ours
            self._all.add(connection)
            return connection
        finally:
            with self._mutex:
                self._opening -= 1
                self._returned.notify()

    def _await_room(self, until: float) -> None:
        while not self._idle and self._count() >= self._limit:
            if not self._returned.wait(max(0.0, until - now())):
                raise BackendUnavailable(f"{self._display}: all {self._limit} connections are busy")

    def _count(self) -> int:
        return self._opening + sum(connection.open for connection in list(self._all))

    def _give_back(self, connection: Connection[Request, Answer]) -> None:
        if connection.open and connection.home is self._home:
            self._idle.append(connection)
        else:
            connection.close()
        if self._starved:
            with self._mutex:
                self._returned.notify()

    def detach(self) -> Connection[Request, Answer] | None:
        """A connection that is idle now, if there is one: whoever gets it has it for good, and
        it counts no longer."""
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
        """Closes what is idle now, and what is in use, or opened later, when it comes back."""
        self._home = object()
        while self._idle:
            self._idle.pop().close()

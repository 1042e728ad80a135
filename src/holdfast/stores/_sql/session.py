"""Sessions that hold locks: one connection each, shared by a client and its renewer.

A session carries one request at a time, under its mutex. The request may come from a thread of
the client, from its event loop or from the renewer's thread. The registry belongs to the store.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Generic, TypeVar

from holdfast.claim import Grant
from holdfast.stores._sql.connection import SqlConnection

__all__ = ["SessionRegistry", "SqlSession", "SqlSessionOf", "ended"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
C = TypeVar("C", bound=SqlConnection[Any, Any])
C_co = TypeVar("C_co", bound=SqlConnection[Any, Any], covariant=True)


class SqlSession(Generic[C_co]):
    """One connection, and the claim that it holds or waits for."""

    __slots__ = (
        "__weakref__",
        "at_head",
        "connection",
        "grant",
        "mutex",
        "nudged",
        "parity",
        "pending",
        "queued_at",
        "reader",
        "until",
        "wake",
    )

    def __init__(self, connection: C_co) -> None:
        self.connection = connection
        self.mutex = threading.Lock()
        self.grant: Grant | None = None
        """The grant that the session holds, if any."""
        self.at_head = False
        """True if the session is at the head of the queue for slots."""
        self.pending = False
        """True while an answer is pending: that of a wait, or of a renewal that timed out."""
        self.parity = 0
        """Changes with each hold, so that the server can tell two holds of a session apart."""
        self.queued_at = 0.0
        """When the session began to wait. A grant received since then may be that old."""
        self.until = inf
        """Deadline of the current attempt for each answer; it may be earlier than the usual one."""
        self.nudged = False
        self.wake: Callable[[], None] | None = None
        """Ends the wait for this session's answer, if a thread or task waits."""
        self.reader: tuple[object, int] | None = None
        """The owner of the loop's reader callback for the socket, and the socket's descriptor."""

    def nudge(self) -> None:
        """Ends the current wait for an answer, or the next one."""
        self.nudged = True
        self.wake_waiter()

    def wake_waiter(self) -> None:
        """Makes a waiting thread or task check again: the answer may have been read already."""
        wake = self.wake
        if wake is not None:
            wake()

    def alive(self) -> bool:
        """True unless the server has ended the session. Sends nothing."""
        connection = self.connection
        return connection.open and (self.pending or connection.is_alive())


SqlSessionOf = SqlSession[SqlConnection[Request, Answer]]
"""Any session whose connection takes this type of request and returns this type of answer."""


class SessionRegistry(Generic[C]):
    """All sessions of one store: by owner while they hold or wait, else idle."""

    def __init__(self, max_idle: int) -> None:
        self.max_idle = max_idle
        self.by_owner: dict[str, SqlSession[C]] = {}
        self.idle: list[SqlSession[C]] = []
        self.attempting: dict[str, object] = {}
        """The owners for which an attempt is running."""
        self.unknown: dict[str, list[C]] = {}
        """By owner: connections that broke during a request, so that it is unknown what their
        sessions hold."""
        self.users = 0

    def borrow(self) -> SqlSession[C] | None:
        """Returns a live idle session, or None."""
        while True:
            try:
                session = self.idle.pop()
            except IndexError:
                return None
            if session.connection.open and not session.connection.has_input():
                return session
            session.connection.close()

    def give_back(self, session: SqlSession[C]) -> None:
        """Makes a session that holds nothing idle, or closes it if there are enough."""
        session.grant, session.at_head, session.nudged, session.until = None, False, False, inf
        session.parity ^= 1
        if len(self.idle) < self.max_idle and session.connection.open:
            self.idle.append(session)
        else:
            session.connection.close()

    def let_go(self, owner: str, session: SqlSession[C], *, clean: bool) -> None:
        """Ends an owner's use of a session. A clean session holds nothing and is kept; another one
        may hold something and is dropped."""
        if clean:
            self.by_owner.pop(owner, None)
            self.give_back(session)
        else:
            self.lose(owner, session)

    def lose(self, owner: str, session: SqlSession[C]) -> None:
        """Drops a broken session. It may still hold locks on the server until ``end_unknown``."""
        if self.by_owner.get(owner) is session:
            del self.by_owner[owner]
        if session.reader is None:
            session.connection.close()
        else:  # a loop reads the socket, and must stop before it is closed
            session.connection.sever()
        session.grant = None
        self.unknown.setdefault(owner, []).append(session.connection)
        while len(self.unknown) > 1000:  # the oldest: their idle timeout ends them
            del self.unknown[next(iter(self.unknown))]

    async def end_unknown(self, owner: str, end: Callable[[C], Awaitable[object]]) -> None:
        """Ends the sessions of an owner whose state is unknown."""
        unknown = self.unknown.pop(owner, [])
        try:
            while unknown:
                await end(unknown[-1])
                unknown.pop()
        finally:
            if unknown:
                self.unknown[owner] = unknown

    def forget(self) -> None:
        """In a forked child the sessions are the parent's. In a later event loop of the same
        process the idle ones are closed."""
        inherited, idle = self.by_owner.values(), self.idle
        self.by_owner, self.idle, self.unknown, self.attempting = {}, [], {}, {}
        for session in inherited:
            session.connection.forget()
        for session in idle:
            session.connection.leave(unused=True)

    def remove_user(self) -> None:
        """Called by a backend that closes. Closes idle sessions; the last user closes all."""
        self.users -= 1
        sessions, self.idle = self.idle, []
        if self.users <= 0:
            sessions += self.by_owner.values()
            self.by_owner = {}
        for session in sessions:
            session.connection.close()


def ended(sessions: list[SqlSession[C]]) -> list[SqlSession[C]]:
    """Returns the sessions that have ended. Sends nothing; skips sessions that are in use."""
    poll = select.poll()
    by_fileno: dict[int, SqlSession[C]] = {}
    gone: list[SqlSession[C]] = []
    for session in sessions:
        if not session.connection.open:
            gone.append(session)
        elif not session.pending and not session.mutex.locked():
            fileno = session.connection.fileno()
            by_fileno[fileno] = session
            poll.register(fileno, select.POLLIN)
    for fileno, _ in poll.poll(0):
        session = by_fileno[fileno]
        if session.mutex.acquire(blocking=False):
            if not session.alive():
                gone.append(session)
            session.mutex.release()
    return gone

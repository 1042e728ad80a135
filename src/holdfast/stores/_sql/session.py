"""Sessions that hold locks: one connection each, shared by a client and its renewer.

A session is used by one request at a time, under its mutex, from whichever world asks: the
client's threads, its event loop, or the renewer's thread. The registry belongs to the store.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Generic, TypeVar

from holdfast.claim import Grant
from holdfast.stores._sql.connection import Connection

__all__ = ["Session", "SessionOf", "Sessions", "ended"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
C = TypeVar("C", bound=Connection[Any, Any])
C_co = TypeVar("C_co", bound=Connection[Any, Any], covariant=True)


class Session(Generic[C_co]):
    """One connection, and what it is for at the moment."""

    __slots__ = (
        "__weakref__",
        "connection",
        "grant",
        "mutex",
        "nudged",
        "owed",
        "parity",
        "reader",
        "sent",
        "turn",
        "until",
        "wake",
    )

    def __init__(self, connection: C_co) -> None:
        self.connection = connection
        self.mutex = threading.Lock()
        self.grant: Grant | None = None
        """What it holds, once it does."""
        self.turn = False
        """Whether it is first of those who wait for slots."""
        self.owed = False
        """Whether an answer is still to come: that of a wait, or of a renewal that was late."""
        self.parity = 0
        """Changes from one hold to the next: tells them apart where the server must."""
        self.sent = 0.0
        """When it began to wait: what it was granted since may be as old."""
        self.until = inf
        """By when an attempt needs its answers: they may be wanted sooner than others."""
        self.nudged = False
        self.wake: Callable[[], None] | None = None
        """Ends the wait of somebody who waits for this session's answer."""
        self.reader: tuple[object, int] | None = None
        """Whose callback the loop has for this session's socket, and the socket's number."""

    def nudge(self) -> None:
        """Ends the wait for an answer, or the next one."""
        self.nudged = True
        self.stir()

    def stir(self) -> None:
        """Lets somebody who waits for an answer look again: another may have read it."""
        wake = self.wake
        if wake is not None:
            wake()

    def alive(self) -> bool:
        """Whether the server has said nothing of its end. Sends nothing."""
        connection = self.connection
        return connection.open and (self.owed or connection.stands())


SessionOf = Session[Connection[Request, Answer]]
"""Any session whose connection sends such requests and gives such answers."""


class Sessions(Generic[C]):
    """All sessions of one store: by owner while they hold or wait, else idle."""

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self.by_owner: dict[str, Session[C]] = {}
        self.idle: list[Session[C]] = []
        self.asking: dict[str, object] = {}
        """The owners for whom somebody asks just now."""
        self.doomed: dict[str, list[C]] = {}
        """Connections that broke in the middle of a request: what they hold is unknown."""
        self.users = 0

    def borrow(self) -> Session[C] | None:
        """An idle session that still stands."""
        while True:
            try:
                session = self.idle.pop()
            except IndexError:
                return None
            if session.connection.open and not session.connection.stirs():
                return session
            session.connection.close()

    def give_back(self, session: Session[C]) -> None:
        """It holds nothing any more."""
        session.grant, session.turn, session.nudged, session.until = None, False, False, inf
        session.parity ^= 1
        if len(self.idle) < self.spare and session.connection.open:
            self.idle.append(session)
        else:
            session.connection.close()

    def let_go(self, owner: str, session: Session[C], *, clean: bool) -> None:
        """One that holds nothing can be used again; one that may hold something can't."""
        if clean:
            self.by_owner.pop(owner, None)
            self.give_back(session)
        else:
            self.lose(owner, session)

    def lose(self, owner: str, session: Session[C]) -> None:
        """It broke: nobody uses it again, and what it may hold has to be ended by others."""
        if self.by_owner.get(owner) is session:
            del self.by_owner[owner]
        if session.reader is None:
            session.connection.close()
        else:  # a loop watches its socket, which must not be closed under it
            session.connection.sever()
        session.grant = None
        self.doomed.setdefault(owner, []).append(session.connection)
        while len(self.doomed) > 1000:  # nobody has asked for these: their timeout ends them
            del self.doomed[next(iter(self.doomed))]

    async def end_doomed(self, owner: str, end: Callable[[C], Awaitable[object]]) -> None:
        """Ends the sessions of an owner that broke in the middle of a request."""
        doomed = self.doomed.pop(owner, [])
        try:
            while doomed:
                await end(doomed[-1])
                doomed.pop()
        finally:
            if doomed:
                self.doomed[owner] = doomed

    def forget(self) -> None:
        """In a forked child: they are the parent's."""
        inherited = [*self.by_owner.values(), *self.idle]
        self.by_owner, self.idle, self.doomed, self.asking = {}, [], {}, {}
        for session in inherited:
            session.connection.forget()

    def leave(self) -> None:
        """One backend less uses them; the last one closes all."""
        self.users -= 1
        sessions, self.idle = self.idle, []
        if self.users <= 0:
            sessions += self.by_owner.values()
            self.by_owner = {}
        for session in sessions:
            session.connection.close()


def ended(sessions: list[Session[C]]) -> list[Session[C]]:
    """Those whose server has said goodbye, or vanished. Sends nothing; skips what is in use."""
    poll = select.poll()
    by_fileno: dict[int, Session[C]] = {}
    gone: list[Session[C]] = []
    for session in sessions:
        if not session.connection.open:
            gone.append(session)
        elif not session.owed and not session.mutex.locked():
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

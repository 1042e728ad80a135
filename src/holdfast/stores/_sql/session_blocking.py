"""The interface of a session driver, and the driver for threads.

It sends one request at a time on a session, or one on each of many sessions at once. The driver
for an event loop is in ``session_aio``.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Dial, SqlConnection, SqlRefused
from holdfast.stores._sql.session import SqlSession, SqlSessionOf

__all__ = [
    "BlockingSessionDriver",
    "SessionDriver",
    "SessionFailures",
    "SessionRequests",
    "take_pending",
]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
C = TypeVar("C", bound=SqlConnection[Any, Any])

LONGEST_WAIT_SECONDS = 3600.0

SessionRequests = dict[SqlSessionOf[Request, Answer], Request]
SessionFailures = dict[SqlSessionOf[Request, Answer], BackendUnavailable]


class SessionDriver(Protocol[Request, Answer]):
    """Sends requests on sessions, for threads or for an event loop."""

    async def open(self, dial: Dial[C], until: float) -> SqlSession[C]: ...

    async def request(
        self, session: SqlSessionOf[Request, Answer], request: Request, until: float
    ) -> Answer:
        """Sends one request and returns its answer. Reads a pending answer first. Closes a
        session that does not answer in time."""
        ...

    async def request_all(
        self, requests: SessionRequests[Request, Answer], until: float
    ) -> SessionFailures[Request, Answer]:
        """Sends one request on each session; the caller holds their mutexes. Returns the
        failures."""
        ...

    async def collect_pending(
        self, session: SqlSessionOf[Request, Answer], until: float
    ) -> Answer | None:
        """Returns the pending answer if it is complete, or if it has started and is complete by
        ``until``; else None."""
        ...

    async def wait_for_reply(self, session: SqlSessionOf[Request, Answer], until: float) -> None:
        """Returns when the pending answer starts to arrive, at a nudge, or at ``until``."""
        ...

    def forget(self) -> None:
        """In a forked child: the waiting threads are the parent's."""
        ...

    def close(self) -> None: ...


class Waker:
    """Lets one thread wait for input on a socket or for a call from another thread.

    The socket pair that carries a call costs more to make than a wait, so wakers are kept.
    """

    __slots__ = ("_inside", "_outside", "_poll")

    def __init__(self) -> None:
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._inside, select.POLLIN)

    def call(self) -> None:
        """Ends the current wait, or the next one. From any thread."""
        with suppress(OSError):  # its buffer is full of calls, or it is closed
            self._outside.send(b"x")

    def wait(self, fileno: int, until: float) -> None:
        """Returns at input, at a call or at ``until``; may return early."""
        self._poll.register(fileno, select.POLLIN)
        try:
            seconds = max(0.0, min(until - now(), LONGEST_WAIT_SECONDS))
            ready = self._poll.poll(seconds * 1000 + 1)
        finally:
            self._poll.unregister(fileno)
        for found, _ in ready:
            if found != fileno:
                with suppress(BlockingIOError):
                    self._inside.recv(4096)

    def close(self) -> None:
        self._inside.close()
        self._outside.close()


class WakerPool:
    """The wakers that are not in use: a stack without a lock."""

    def __init__(self) -> None:
        self._idle: list[Waker] = []
        self._closed = False

    def borrow(self) -> Waker:
        try:
            return self._idle.pop()
        except IndexError:
            return Waker()

    def give_back(self, waker: Waker) -> None:
        self._idle.append(waker)
        if self._closed:
            self.close()

    def forget(self) -> None:
        """In a forked child: a call through these sockets would reach the parent."""
        idle, self._idle = self._idle, []
        for waker in idle:
            waker.close()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                self._idle.pop().close()


class BlockingSessionDriver(Generic[Request, Answer]):
    """The session driver for threads."""

    def __init__(self) -> None:
        self._wakers = WakerPool()

    async def open(self, dial: Dial[C], until: float) -> SqlSession[C]:
        return SqlSession(dial(until))

    async def request(
        self, session: SqlSessionOf[Request, Answer], request: Request, until: float
    ) -> Answer:
        if not session.mutex.acquire(timeout=max(0.0, until - now())):
            raise session.connection.broken("an earlier request is still under way")
        try:
            if session.pending:
                with suppress(SqlRefused):  # only its end matters here
                    take_pending(session, session.connection.receive(until))
            return session.connection.request(request, until)
        finally:
            session.mutex.release()
            session.wake_waiter()

    async def request_all(
        self, requests: SessionRequests[Request, Answer], until: float
    ) -> SessionFailures[Request, Answer]:
        return _request_all(requests, until)

    async def collect_pending(
        self, session: SqlSessionOf[Request, Answer], until: float
    ) -> Answer | None:
        with session.mutex:
            answer = session.connection.arrived()
            if answer is None and session.connection.reply_started():
                answer = session.connection.receive(until)
        if answer is not None:
            session.wake_waiter()
        return None if answer is None else take_pending(session, answer)

    async def wait_for_reply(self, session: SqlSessionOf[Request, Answer], until: float) -> None:
        waker = self._wakers.borrow()
        session.wake = waker.call
        try:
            if not session.nudged and session.connection.open:
                waker.wait(session.connection.fileno(), until)
        finally:
            session.wake = None
            session.nudged = False
            self._wakers.give_back(waker)

    def forget(self) -> None:
        self._wakers.forget()

    def close(self) -> None:
        self._wakers.close()


def take_pending(session: SqlSessionOf[Request, Answer], answer: Answer | None) -> Answer:
    """Marks the pending answer as received and returns it. If there is none, closes the session
    and raises."""
    if answer is None:
        session.connection.close()
        raise session.connection.broken("no answer in time")
    session.pending = False
    return session.connection.for_caller(answer)


def _request_all(
    requests: SessionRequests[Request, Answer], until: float
) -> SessionFailures[Request, Answer]:
    """Waits for all answers at the same time. A session whose answer is late stays open, with the
    answer pending."""
    failed: SessionFailures[Request, Answer] = {}
    late = {session for session in requests if session.pending}
    due = {
        session.connection.fileno(): session
        for session in requests
        if session in late or _send(session, requests[session], failed)
    }
    poll = select.poll()
    for fileno in due:
        poll.register(fileno, select.POLLIN)
    while due:
        left = until - now()
        ready = poll.poll(left * 1000 + 1 if left > 0 else 0)
        if not ready:
            break
        for fileno, _ in ready:
            session = due[fileno]
            if not _collected(session, failed):
                continue
            if session in late and session not in failed:  # now its own request can be sent
                late.discard(session)
                if _send(session, requests[session], failed):
                    continue
            del due[fileno]
            poll.unregister(fileno)
    failed |= {session: session.connection.broken("no answer in time") for session in due.values()}
    return failed


def _send(
    session: SqlSessionOf[Request, Answer],
    request: Request,
    failed: SessionFailures[Request, Answer],
) -> bool:
    try:
        session.connection.send(request)
    except BackendUnavailable as error:
        failed[session] = error
        return False
    session.pending = True
    return True


def _collected(
    session: SqlSessionOf[Request, Answer], failed: SessionFailures[Request, Answer]
) -> bool:
    """Returns True when the answer is complete or can never arrive."""
    try:
        answer = session.connection.collect()
        if answer is None:
            return False
        session.pending = False
        session.connection.checked(answer)
    except BackendUnavailable as error:
        failed[session] = error
    return True

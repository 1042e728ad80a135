"""How threads use a session: one request at a time, or one on each of many at once.

The asyncio variant is in ``sql_talk_async``.
"""

from __future__ import annotations

import select
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Connection, Dial, Refused
from holdfast.stores._sql.session import Session, SessionOf
from holdfast.stores._sql.waker import Wakers

__all__ = ["Asked", "BlockingTalk", "Failed", "Talk", "settled"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
C = TypeVar("C", bound=Connection[Any, Any])

Asked = dict[SessionOf[Request, Answer], Request]
Failed = dict[SessionOf[Request, Answer], BackendUnavailable]


class Talk(Protocol[Request, Answer]):
    """How a world uses a session."""

    async def open(self, dial: Dial[C], until: float) -> Session[C]: ...

    async def ask(
        self, session: SessionOf[Request, Answer], request: Request, until: float
    ) -> Answer:
        """One request and its answer, behind an answer that is owed. Whatever does not answer
        is closed."""
        ...

    async def ask_all(self, asked: Asked[Request, Answer], until: float) -> Failed[Request, Answer]:
        """One request on each of many sessions whose mutexes the caller has; which failed."""
        ...

    async def settle(self, session: SessionOf[Request, Answer], until: float) -> Answer | None:
        """The answer that is owed, if it has come, or has begun to and is complete by then."""
        ...

    async def idle(self, session: SessionOf[Request, Answer], until: float) -> None:
        """Returns when the owed answer begins to come, or at a nudge."""
        ...

    def forget(self) -> None:
        """In a forked child: what waits is the parent's."""
        ...

    def close(self) -> None: ...


class BlockingTalk(Generic[Request, Answer]):
    """For threads."""

    def __init__(self) -> None:
        self._wakers = Wakers()

    async def open(self, dial: Dial[C], until: float) -> Session[C]:
        return Session(dial(until))

    async def ask(
        self, session: SessionOf[Request, Answer], request: Request, until: float
    ) -> Answer:
        if not session.mutex.acquire(timeout=max(0.0, until - now())):
            raise session.connection.broken("an earlier request is still under way")
        try:
            if session.owed:
                with suppress(Refused):  # whatever it was, it is answered
                    settled(session, session.connection.receive(until))
            return session.connection.request(request, until)
        finally:
            session.mutex.release()
            session.stir()

    async def ask_all(self, asked: Asked[Request, Answer], until: float) -> Failed[Request, Answer]:
        return _ask_all(asked, until)

    async def settle(self, session: SessionOf[Request, Answer], until: float) -> Answer | None:
        with session.mutex:
            answer = session.connection.arrived()
            if answer is None and session.connection.comes():
                answer = session.connection.receive(until)
        if answer is not None:
            session.stir()
        return None if answer is None else settled(session, answer)

    async def idle(self, session: SessionOf[Request, Answer], until: float) -> None:
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


def settled(session: SessionOf[Request, Answer], answer: Answer | None) -> Answer:
    """An answer that was owed, or the end of a session that did not give it in time."""
    if answer is None:
        session.connection.close()
        raise session.connection.broken("no answer in time")
    session.owed = False
    return session.connection.given(answer)


def _ask_all(asked: Asked[Request, Answer], until: float) -> Failed[Request, Answer]:
    """In the time of one. A session whose answer is late still owes it, and may go on."""
    failed: Failed[Request, Answer] = {}
    late = {session for session in asked if session.owed}
    due = {
        session.connection.fileno(): session
        for session in asked
        if session in late or _send(session, asked[session], failed)
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
            if session in late and session not in failed:  # now it can be asked
                late.discard(session)
                if _send(session, asked[session], failed):
                    continue
            del due[fileno]
            poll.unregister(fileno)
    failed |= {session: session.connection.broken("no answer in time") for session in due.values()}
    return failed


def _send(
    session: SessionOf[Request, Answer],
    request: Request,
    failed: Failed[Request, Answer],
) -> bool:
    try:
        session.connection.send(request)
    except BackendUnavailable as error:
        failed[session] = error
        return False
    session.owed = True
    return True


def _collected(session: SessionOf[Request, Answer], failed: Failed[Request, Answer]) -> bool:
    """Whether an answer is complete, or will never be."""
    try:
        answer = session.connection.collect()
        if answer is None:
            return False
        session.owed = False
        session.connection.checked(answer)
    except BackendUnavailable as error:
        failed[session] = error
    return True

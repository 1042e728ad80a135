"""How threads use a session: one request at a time, or one on each of many at once.

The asyncio variant is in ``mysql_talk_async``.
"""

from __future__ import annotations

import select
from typing import Protocol

from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.wires.mysql import Dial
from holdfast.wires.mysql_protocol import Reply
from holdfast.wires.mysql_session import Session
from holdfast.wires.waker import Wakers

__all__ = ["Asked", "BlockingTalk", "Talk", "settled"]

Asked = dict[Session, bytes]


class Talk(Protocol):
    """How a world uses a session."""

    async def open(self, dial: Dial, until: float) -> Session: ...

    async def ask(self, session: Session, sql: bytes, until: float) -> Reply:
        """One request and its answer, behind an answer that is owed. Whatever does not answer
        is closed."""
        ...

    async def begin(self, session: Session, sql: bytes, until: float) -> Reply | None:
        """One request whose first statement tells, with 1, that the others don't wait. Its answer;
        or nothing if they do, and it is owed."""
        ...

    async def ask_all(self, asked: Asked, until: float) -> dict[Session, BackendUnavailable]:
        """One request on each of many sessions whose mutexes the caller has; which failed."""
        ...

    async def settle(self, session: Session, until: float) -> Reply | None:
        """The answer that is owed, if it has come, or has begun to and is complete by then."""
        ...

    async def idle(self, session: Session, until: float) -> None:
        """Returns when the owed answer begins to come, or at a nudge."""
        ...

    def forget(self) -> None:
        """In a forked child: what waits is the parent's."""
        ...

    def close(self) -> None: ...


class BlockingTalk:
    """For threads."""

    def __init__(self) -> None:
        self._wakers = Wakers()

    async def open(self, dial: Dial, until: float) -> Session:
        return Session(dial(until))

    async def ask(self, session: Session, sql: bytes, until: float) -> Reply:
        if not session.mutex.acquire(timeout=max(0.0, until - now())):
            raise session.connection.broken("an earlier request is still under way")
        try:
            if session.owed:
                settled(session, session.connection.receive(until))
            return session.connection.request(sql, until)
        finally:
            session.mutex.release()
            session.stir()

    async def begin(self, session: Session, sql: bytes, until: float) -> Reply | None:
        connection = session.connection
        with session.mutex:
            try:
                connection.send(sql)
                session.owed = True
                answer = connection.receive(until, begun=True)
                waits = answer is None and connection.waits()
                return None if waits else settled(session, answer)
            except BaseException:  # also an interrupt: the answer is still to come
                connection.close()
                raise

    async def ask_all(self, asked: Asked, until: float) -> dict[Session, BackendUnavailable]:
        return _ask_all(asked, until)

    async def settle(self, session: Session, until: float) -> Reply | None:
        with session.mutex:
            answer = session.connection.collect()
            if answer is None and session.connection.comes():
                answer = session.connection.receive(until)
        if answer is not None:
            session.stir()
        return None if answer is None else settled(session, answer)

    async def idle(self, session: Session, until: float) -> None:
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


def settled(session: Session, answer: Reply | None) -> Reply:
    """An answer that was owed, or the end of a session that did not give it in time."""
    if answer is None:
        session.connection.close()
        raise session.connection.broken("no answer in time")
    session.owed = False
    return answer


def _ask_all(asked: Asked, until: float) -> dict[Session, BackendUnavailable]:
    """In the time of one. A session whose answer is late still owes it, and may go on."""
    failed: dict[Session, BackendUnavailable] = {}
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


def _send(session: Session, sql: bytes, failed: dict[Session, BackendUnavailable]) -> bool:
    try:
        session.connection.send(sql)
    except BackendUnavailable as error:
        failed[session] = error
        return False
    session.owed = True
    return True


def _collected(session: Session, failed: dict[Session, BackendUnavailable]) -> bool:
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

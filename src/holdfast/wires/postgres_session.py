"""Sessions that hold advisory locks: one connection each, shared by a door and its keeper.

A session is used by one request at a time, under its mutex, from whichever world asks: the
door's threads, its event loop, or the keeper's thread. The registry belongs to the store.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from psycopg import Error as PsycopgError
from psycopg.pq.abc import PGresult

from holdfast.claim import Grant
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.wires.postgres import Connection, Dial, Dropped, Refused, Statement
from holdfast.wires.postgres_async import in_thread

__all__ = ["AsyncTalk", "BlockingTalk", "Parameters", "Session", "Sessions", "Talk"]

Parameters = Sequence[bytes | None]
LONGEST_WAIT_SECONDS = 3600.0


class Session:
    """One connection, and what it is for at the moment."""

    __slots__ = (
        "__weakref__",
        "connection",
        "grant",
        "mutex",
        "nudged",
        "owed",
        "reader",
        "turn",
        "wake",
    )

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.mutex = threading.Lock()
        self.grant: Grant | None = None
        """What it holds, once it does."""
        self.turn = False
        """Whether it is first of those who wait for slots."""
        self.owed = False
        """Whether an answer is still to come: that of a wait, or of a renewal that was late."""
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
        if not connection.open:
            return False
        if self.owed or not connection.stirs():
            return True
        try:
            connection.pgconn.consume_input()
        except PsycopgError:
            connection.close()
        return connection.open and not connection.stirs()


class Sessions:
    """All sessions of one store: by owner while they hold or wait, else idle."""

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self.by_owner: dict[str, Session] = {}
        self.idle: list[Session] = []
        self.asking: dict[str, object] = {}
        """The owners for whom somebody asks just now."""
        self.doomed: dict[str, list[Connection]] = {}
        """Connections that broke in the middle of a request: what they hold is unknown."""
        self.users = 0

    def borrow(self) -> Session | None:
        """An idle session that still stands."""
        while True:
            try:
                session = self.idle.pop()
            except IndexError:
                return None
            if session.connection.open and not session.connection.stirs():
                return session
            session.connection.close()

    def give_back(self, session: Session) -> None:
        """It holds nothing any more."""
        session.grant, session.turn, session.nudged = None, False, False
        if len(self.idle) < self.spare and session.connection.open:
            self.idle.append(session)
        else:
            session.connection.close()

    def lose(self, owner: str, session: Session) -> None:
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


Asked = dict[Session, tuple[Statement, Parameters]]


class Talk(Protocol):
    """How a world uses a session."""

    async def open(self, dial: Dial) -> Session: ...

    async def ask(
        self, session: Session, statement: Statement, parameters: Parameters, until: float
    ) -> PGresult:
        """One request and its answer, behind an answer that is owed. Whatever does not answer
        is closed."""
        ...

    async def ask_all(self, asked: Asked, until: float) -> dict[Session, BackendUnavailable]:
        """One request on each of many sessions whose mutexes the caller has; which failed."""
        ...

    async def settle(self, session: Session, until: float) -> PGresult | None:
        """The answer that is owed, if it comes by then."""
        ...

    async def idle(self, session: Session, until: float) -> None:
        """Returns when the owed answer begins to come, or at a nudge."""
        ...


class BlockingTalk:
    """For threads."""

    async def open(self, dial: Dial) -> Session:
        return Session(dial())

    async def ask(
        self, session: Session, statement: Statement, parameters: Parameters, until: float
    ) -> PGresult:
        if not session.mutex.acquire(timeout=max(0.0, until - now())):
            raise session.connection.broken("an earlier request is still under way")
        try:
            if session.owed:
                with suppress(Refused):  # whatever it was, it is answered
                    _settled(session, session.connection.receive(until))
            return session.connection.request(statement, parameters, until)
        finally:
            session.mutex.release()
            session.stir()

    async def ask_all(self, asked: Asked, until: float) -> dict[Session, BackendUnavailable]:
        return _ask_all(asked, until)

    async def settle(self, session: Session, until: float) -> PGresult | None:
        with session.mutex:
            answer = session.connection.receive(until)
        if answer is not None:
            session.stir()
        return None if answer is None else _settled(session, answer)

    async def idle(self, session: Session, until: float) -> None:
        inside, outside = socket.socketpair()
        with inside, outside:
            session.wake = lambda: _write(outside)
            if not session.nudged and session.connection.open:
                poll = select.poll()
                poll.register(session.connection.fileno(), select.POLLIN)
                poll.register(inside, select.POLLIN)
                poll.poll(max(0.0, min(until - now(), LONGEST_WAIT_SECONDS)) * 1000 + 1)
            session.wake = None
            session.nudged = False


def _settled(session: Session, answer: PGresult | None) -> PGresult:
    if answer is None:
        session.connection.close()
        raise session.connection.broken("no answer in time")
    session.owed = False
    return session.connection.checked(answer)


def _write(outside: socket.socket) -> None:
    with suppress(OSError):  # the wait is over
        outside.send(b"x")


class AsyncTalk:
    """For the tasks of one loop."""

    async def open(self, dial: Dial) -> Session:
        return await in_thread(lambda: Session(dial()), lambda made: made.connection.close())

    async def ask(
        self, session: Session, statement: Statement, parameters: Parameters, until: float
    ) -> PGresult:
        await _lock(session, until)
        try:
            return await self._ask(session, statement, parameters, until)
        finally:
            session.mutex.release()
            session.stir()

    async def _ask(
        self, session: Session, statement: Statement, parameters: Parameters, until: float
    ) -> PGresult:
        connection = session.connection
        try:
            if session.owed:
                with suppress(Refused):  # whatever it was, it is answered
                    _settled(session, await _receive(session, until))
            connection.send(statement, parameters)
            session.owed = True
            return _settled(session, await _receive(session, until))
        except Refused:
            raise
        except BaseException:  # late or cancelled: the answer is still to come
            _remove_reader(session)
            connection.close()
            raise

    async def ask_all(self, asked: Asked, until: float) -> dict[Session, BackendUnavailable]:
        failed: dict[Session, BackendUnavailable] = {}
        for session, (statement, parameters) in asked.items():
            try:
                await self._ask(session, statement, parameters, until)
            except BackendUnavailable as error:
                failed[session] = error
        return failed

    async def settle(self, session: Session, until: float) -> PGresult | None:
        await _lock(session, until)
        connection = session.connection
        try:
            answer = connection.receive(0.0)
            if answer is None and until > now():
                answer = await _receive(session, until)
            return None if answer is None else _settled(session, answer)
        except Dropped:
            _remove_reader(session)
            raise
        finally:
            session.mutex.release()
            session.stir()

    async def idle(self, session: Session, until: float) -> None:
        if not session.connection.open:
            return
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        if session.reader is None:  # else whoever reads now stirs us when it is done
            _add_reader(session, ready, lambda: _set(ready))
        session.wake = lambda: _stir(loop, ready)
        try:
            if not session.nudged:
                await asyncio.wait([ready], timeout=max(0.0, until - now()))
        finally:
            session.wake = None
            session.nudged = False
            _remove_reader(session, ready)


async def _lock(session: Session, until: float) -> None:
    """The session's mutex, without ever blocking the loop."""
    mutex = session.mutex
    if mutex.acquire(blocking=False):
        return
    left = max(0.0, until - now())

    def give_up(taken: bool) -> None:
        if taken:
            mutex.release()

    if not await in_thread(lambda: mutex.acquire(timeout=left), give_up):
        raise session.connection.broken("an earlier request is still under way")


def _add_reader(session: Session, who: object, callback: Callable[[], None]) -> None:
    fileno = session.connection.fileno()
    session.reader = who, fileno
    asyncio.get_running_loop().add_reader(fileno, callback)


def _remove_reader(session: Session, who: object = None) -> None:
    """Unless somebody else has taken its place since. Before, or right when, it is closed: the
    loop must not keep the number of a socket that another one may get."""
    if session.reader is not None and who in (None, session.reader[0]):
        asyncio.get_running_loop().remove_reader(session.reader[1])
        session.reader = None


async def _receive(session: Session, until: float) -> PGresult | None:
    """The answer, or nothing if it is not complete by then."""
    loop = asyncio.get_running_loop()
    connection = session.connection
    future: asyncio.Future[PGresult | None] = loop.create_future()

    def readable() -> None:
        try:
            answer = connection.collect()
        except BackendUnavailable as error:
            _remove_reader(session)
            if not future.done():
                future.set_exception(error)
            return
        if answer is not None and not future.done():
            future.set_result(answer)

    def late() -> None:
        if not future.done():
            future.set_result(None)

    _add_reader(session, future, readable)
    timer = loop.call_later(max(0.0, until - now()), late)
    try:
        return await future
    finally:
        timer.cancel()
        _remove_reader(session, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _stir(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(_set, future)


def _ask_all(asked: Asked, until: float) -> dict[Session, BackendUnavailable]:
    """In the time of one. A session whose answer is late still owes it, and may go on."""
    failed: dict[Session, BackendUnavailable] = {}
    late = {session for session in asked if session.owed}
    due = {
        session.connection.fileno(): session
        for session in asked
        if session in late or _send(session, *asked[session], failed)
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
                if _send(session, *asked[session], failed):
                    continue
            del due[fileno]
            poll.unregister(fileno)
    failed |= {session: session.connection.broken("no answer in time") for session in due.values()}
    return failed


def _send(
    session: Session,
    statement: Statement,
    parameters: Parameters,
    failed: dict[Session, BackendUnavailable],
) -> bool:
    try:
        session.connection.send(statement, parameters)
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

"""How the tasks of one loop use a session. See ``mysql_talk``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.wires.mysql import Dial, Dropped
from holdfast.wires.mysql_async import in_thread
from holdfast.wires.mysql_protocol import Reply
from holdfast.wires.mysql_session import Session
from holdfast.wires.mysql_talk import Asked, settled

__all__ = ["AsyncTalk"]


class AsyncTalk:
    """For the tasks of one loop."""

    async def open(self, dial: Dial, until: float) -> Session:
        return await in_thread(lambda: Session(dial(until)), lambda made: made.connection.close())

    async def ask(self, session: Session, sql: bytes, until: float) -> Reply:
        await _lock(session, until)
        try:
            return await self._ask(session, sql, until)
        finally:
            session.mutex.release()
            session.stir()

    async def _ask(self, session: Session, sql: bytes, until: float) -> Reply:
        connection = session.connection
        try:
            if session.owed:
                settled(session, await _receive(session, until))
            connection.send(sql)
            session.owed = True
            return settled(session, await _receive(session, until))
        except BaseException:  # late or cancelled: the answer is still to come
            _remove_reader(session)
            connection.close()
            raise

    async def begin(self, session: Session, sql: bytes, until: float) -> Reply | None:
        await _lock(session, until)
        connection = session.connection
        try:
            connection.send(sql)
            session.owed = True
            answer = await _receive(session, until, begun=True)
            waits = answer is None and connection.waits()
            return None if waits else settled(session, answer)
        except BaseException:  # late or cancelled: the answer is still to come
            _remove_reader(session)
            connection.close()
            raise
        finally:
            session.mutex.release()
            session.stir()

    async def ask_all(self, asked: Asked, until: float) -> dict[Session, BackendUnavailable]:
        failed: dict[Session, BackendUnavailable] = {}
        for session, sql in asked.items():
            try:
                await self._ask(session, sql, until)
            except BackendUnavailable as error:
                failed[session] = error
        return failed

    async def settle(self, session: Session, until: float) -> Reply | None:
        await _lock(session, until)
        connection = session.connection
        try:
            answer = connection.collect()
            if answer is None and connection.comes():
                answer = await _receive(session, until)
            return None if answer is None else settled(session, answer)
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

    def forget(self) -> None:
        """A loop's waits end with it."""

    def close(self) -> None:
        """A loop's waits end with it."""


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


async def _receive(session: Session, until: float, *, begun: bool = False) -> Reply | None:
    """The answer, or nothing if it is not complete by then; or has begun, and waits."""
    loop = asyncio.get_running_loop()
    connection = session.connection
    future: asyncio.Future[Reply | None] = loop.create_future()

    def readable() -> None:
        try:
            answer = connection.collect()
        except BackendUnavailable as error:
            _remove_reader(session)
            if not future.done():
                future.set_exception(error)
            return
        if (answer is not None or (begun and connection.waits())) and not future.done():
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

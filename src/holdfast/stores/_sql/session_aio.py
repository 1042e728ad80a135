"""How the tasks of one loop use a session. See ``sql_talk``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Connection, Dial, Dropped, Refused
from holdfast.stores._sql.in_thread import in_thread
from holdfast.stores._sql.session import Session, SessionOf
from holdfast.stores._sql.session_blocking import Asked, Failed, settled

__all__ = ["AsyncTalk", "lock", "receive", "remove_reader"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
C = TypeVar("C", bound=Connection[Any, Any])


class AsyncTalk(Generic[Request, Answer]):
    """For the tasks of one loop."""

    async def open(self, dial: Dial[C], until: float) -> Session[C]:
        return await in_thread(lambda: Session(dial(until)), lambda made: made.connection.close())

    async def ask(
        self, session: SessionOf[Request, Answer], request: Request, until: float
    ) -> Answer:
        await lock(session, until)
        try:
            return await self._ask(session, request, until)
        finally:
            session.mutex.release()
            session.stir()

    async def _ask(
        self, session: SessionOf[Request, Answer], request: Request, until: float
    ) -> Answer:
        connection = session.connection
        try:
            if session.owed:
                owed = await receive(session, until)
                with suppress(Refused):  # whatever it was, it is answered
                    settled(session, owed)
            connection.send(request)
            session.owed = True
            answer = await receive(session, until)
            return settled(session, answer)
        except Refused:
            raise
        except BaseException:  # late or cancelled: the answer is still to come
            remove_reader(session)
            connection.close()
            raise

    async def ask_all(self, asked: Asked[Request, Answer], until: float) -> Failed[Request, Answer]:
        failed: Failed[Request, Answer] = {}
        for session, request in asked.items():
            try:
                await self._ask(session, request, until)
            except BackendUnavailable as error:
                failed[session] = error
        return failed

    async def settle(self, session: SessionOf[Request, Answer], until: float) -> Answer | None:
        await lock(session, until)
        connection = session.connection
        try:
            answer = connection.arrived()
            if answer is None and connection.comes():
                answer = await receive(session, until)
            return None if answer is None else settled(session, answer)
        except Dropped:
            remove_reader(session)
            raise
        finally:
            session.mutex.release()
            session.stir()

    async def idle(self, session: SessionOf[Request, Answer], until: float) -> None:
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
            remove_reader(session, ready)

    def forget(self) -> None:
        """A loop's waits end with it."""

    def close(self) -> None:
        """A loop's waits end with it."""


async def lock(session: SessionOf[Any, Any], until: float) -> None:
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


def _add_reader(session: SessionOf[Any, Any], who: object, callback: Callable[[], None]) -> None:
    fileno = session.connection.fileno()
    session.reader = who, fileno
    asyncio.get_running_loop().add_reader(fileno, callback)


def remove_reader(session: SessionOf[Any, Any], who: object = None) -> None:
    """Unless somebody else has taken its place since. Before, or right when, it is closed: the
    loop must not keep the number of a socket that another one may get."""
    if session.reader is not None and who in (None, session.reader[0]):
        asyncio.get_running_loop().remove_reader(session.reader[1])
        session.reader = None


async def receive(
    session: SessionOf[Request, Answer], until: float, enough: Callable[[], bool] | None = None
) -> Answer | None:
    """The answer, or nothing if it is not complete by then; or what has come is enough."""
    loop = asyncio.get_running_loop()
    connection = session.connection
    future: asyncio.Future[Answer | None] = loop.create_future()

    def readable() -> None:
        try:
            answer = connection.collect()
        except BackendUnavailable as error:
            remove_reader(session)
            if not future.done():
                future.set_exception(error)
            return
        if (answer is not None or (enough is not None and enough())) and not future.done():
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
        remove_reader(session, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _stir(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(_set, future)

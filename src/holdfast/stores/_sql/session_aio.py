"""The session driver for the tasks of one event loop. See ``session_blocking``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql.aio import in_thread, no_readers
from holdfast.stores._sql.connection import Dial, Dropped, SqlConnection, SqlRefused
from holdfast.stores._sql.session import SqlSession, SqlSessionOf
from holdfast.stores._sql.session_blocking import SessionFailures, SessionRequests, take_pending

__all__ = ["AsyncSessionDriver", "lock", "receive", "remove_reader"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
C = TypeVar("C", bound=SqlConnection[Any, Any])


class AsyncSessionDriver(Generic[Request, Answer]):
    """The session driver for the tasks of one event loop."""

    async def open(self, dial: Dial[C], until: float) -> SqlSession[C]:
        return await in_thread(
            lambda: SqlSession(dial(until)), lambda made: made.connection.close()
        )

    async def request(
        self, session: SqlSessionOf[Request, Answer], request: Request, until: float
    ) -> Answer:
        await lock(session, until)
        try:
            return await self._request(session, request, until)
        finally:
            session.mutex.release()
            session.wake_waiter()

    async def _request(
        self, session: SqlSessionOf[Request, Answer], request: Request, until: float
    ) -> Answer:
        connection = session.connection
        try:
            if session.pending:
                late = await receive(session, until)
                with suppress(SqlRefused):  # only its end matters here
                    take_pending(session, late)
            connection.send(request)
            session.pending = True
            answer = await receive(session, until)
            return take_pending(session, answer)
        except SqlRefused:
            raise
        except BaseException:  # late or cancelled: the answer is still pending
            remove_reader(session)
            connection.close()
            raise

    async def request_all(
        self, requests: SessionRequests[Request, Answer], until: float
    ) -> SessionFailures[Request, Answer]:
        failed: SessionFailures[Request, Answer] = {}
        for session, request in requests.items():
            try:
                await self._request(session, request, until)
            except BackendUnavailable as error:
                failed[session] = error
        return failed

    async def collect_pending(
        self, session: SqlSessionOf[Request, Answer], until: float
    ) -> Answer | None:
        await lock(session, until)
        connection = session.connection
        try:
            answer = connection.arrived()
            if answer is None and connection.reply_started():
                answer = await receive(session, until)
            return None if answer is None else take_pending(session, answer)
        except Dropped:
            remove_reader(session)
            raise
        finally:
            session.mutex.release()
            session.wake_waiter()

    async def wait_for_reply(self, session: SqlSessionOf[Request, Answer], until: float) -> None:
        if not session.connection.open:
            return
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        if session.reader is None:  # else the current reader calls ``wake_waiter`` at its end
            _add_reader(session, ready, lambda: _set(ready))
        session.wake = lambda: _wake_from_any_thread(loop, ready)
        try:
            if not session.nudged:
                await asyncio.wait([ready], timeout=max(0.0, until - now()))
        finally:
            session.wake = None
            session.nudged = False
            remove_reader(session, ready)

    def forget(self) -> None:
        """Nothing to do: the waits end with their loop."""

    def close(self) -> None:
        """Nothing to do: the waits end with their loop."""


async def lock(session: SqlSessionOf[Any, Any], until: float) -> None:
    """Acquires the session's mutex without blocking the loop; raises if it takes too long."""
    mutex = session.mutex
    if mutex.acquire(blocking=False):
        return
    left = max(0.0, until - now())

    def give_up(taken: bool) -> None:
        if taken:
            mutex.release()

    if not await in_thread(lambda: mutex.acquire(timeout=left), give_up):
        raise session.connection.broken("an earlier request is still under way")


def _add_reader(
    session: SqlSessionOf[Any, Any], reader: object, callback: Callable[[], None]
) -> None:
    fileno = session.connection.fileno()
    try:
        asyncio.get_running_loop().add_reader(fileno, callback)
    except NotImplementedError:
        raise no_readers(session.connection) from None
    session.reader = reader, fileno


def remove_reader(session: SqlSessionOf[Any, Any], reader: object = None) -> None:
    """Removes the loop's reader if it belongs to ``reader``, or any reader if that is None. Must
    run before the socket is closed, or right after: its descriptor may be reused."""
    if session.reader is not None and reader in (None, session.reader[0]):
        asyncio.get_running_loop().remove_reader(session.reader[1])
        session.reader = None


async def receive(
    session: SqlSessionOf[Request, Answer], until: float, enough: Callable[[], bool] | None = None
) -> Answer | None:
    """Returns the answer, or None if it is not complete by ``until``. Returns None early if
    ``enough`` says that the input read so far is sufficient."""
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


def _wake_from_any_thread(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(_set, future)

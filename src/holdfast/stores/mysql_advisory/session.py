"""What a session of MySQL can do besides: begin a request that may go on to wait on the server.

Everything else about sessions is in ``sql_session``, ``sql_talk`` and ``sql_talk_async``.
"""

from __future__ import annotations

import secrets
from typing import Protocol

from holdfast.errors import Unsupported
from holdfast.stores._sql import session_aio as sql_talk_async
from holdfast.stores._sql import session_blocking as sql_talk
from holdfast.stores._sql.session_aio import lock, receive, remove_reader
from holdfast.stores._sql.session_blocking import settled
from holdfast.stores.mysql.connect import Dialler
from holdfast.stores.mysql.connection import Connection, Session
from holdfast.stores.mysql.protocol import Reply
from holdfast.stores.mysql_advisory.sql import session_lock

__all__ = ["AsyncTalk", "BlockingTalk", "Talk", "open_session"]


class Talk(sql_talk.SessionDriver[bytes, Reply], Protocol):
    """How a world uses a session."""

    async def begin(self, session: Session, sql: bytes, until: float) -> Reply | None:
        """One request whose first statement tells, with 1, that the others don't wait. Its answer;
        or nothing if they do, and it is owed."""
        ...


class BlockingTalk(sql_talk.BlockingSessionDriver[bytes, Reply]):
    """For threads."""

    async def begin(self, session: Session, sql: bytes, until: float) -> Reply | None:
        connection = session.connection
        with session.mutex:
            try:
                connection.send(sql)
                session.pending = True
                answer = connection.receive(until, connection.waits)
                waits = answer is None and connection.waits()
                return None if waits else take_pending(session, answer)
            except BaseException:  # also an interrupt: the answer is still to come
                connection.close()
                raise


class AsyncTalk(sql_talk_async.AsyncSessionDriver[bytes, Reply]):
    """For the tasks of one loop."""

    async def begin(self, session: Session, sql: bytes, until: float) -> Reply | None:
        await lock(session, until)
        connection = session.connection
        try:
            connection.send(sql)
            session.pending = True
            answer = await receive(session, until, connection.waits)
            waits = answer is None and connection.waits()
            return None if waits else take_pending(session, answer)
        except BaseException:  # late or cancelled: the answer is still to come
            remove_reader(session)
            connection.close()
            raise
        finally:
            session.mutex.release()
            session.stir()


def open_session(dialler: Dialler, until: float) -> Connection:
    """A connection that others can find by its tag, and end."""
    connection = dialler.enter(until)
    try:
        tag = secrets.token_hex(12)
        ask = b"SELECT GET_LOCK(%s, 0), CONNECTION_ID()" % session_lock(tag)
        ((got, number),) = connection.checked(connection.request(ask, until))[0].rows
        if got != b"1":
            raise Unsupported(f"{dialler.address.display} gives no named locks (GET_LOCK)")
        connection.tag, connection.number = tag, int(number or 0)
    except BaseException:
        connection.close()
        raise
    return connection

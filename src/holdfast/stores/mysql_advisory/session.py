"""Sessions that hold named locks: how they are opened, and requests that may wait on the server.

The rest of a session is shared with PostgreSQL (``stores/_sql``).
"""

from __future__ import annotations

import secrets
from typing import Protocol

from holdfast.errors import Unsupported
from holdfast.stores._sql import session_aio, session_blocking
from holdfast.stores._sql.session_aio import lock, receive, remove_reader
from holdfast.stores._sql.session_blocking import take_pending
from holdfast.stores.mysql.connect import MySqlDialler
from holdfast.stores.mysql.connection import MySqlConnection, MySqlSession
from holdfast.stores.mysql.protocol import MySqlReply
from holdfast.stores.mysql_advisory.sql import session_lock

__all__ = [
    "AsyncMySqlSessionDriver",
    "BlockingMySqlSessionDriver",
    "MySqlSessionDriver",
    "open_session",
]


class MySqlSessionDriver(session_blocking.SessionDriver[bytes, MySqlReply], Protocol):
    """Sends requests on a session, for threads or for an event loop."""

    async def begin(self, session: MySqlSession, sql: bytes, until: float) -> MySqlReply | None:
        """Sends a request whose first result is 1 if the rest will not wait. Returns the reply, or
        None if the request waits on the server: its reply is then pending."""
        ...


class BlockingMySqlSessionDriver(session_blocking.BlockingSessionDriver[bytes, MySqlReply]):
    """The variant for threads."""

    async def begin(self, session: MySqlSession, sql: bytes, until: float) -> MySqlReply | None:
        connection = session.connection
        with session.mutex:
            try:
                connection.send(sql)
                session.pending = True
                answer = connection.receive(until, connection.waits)
                waits = answer is None and connection.waits()
                return None if waits else take_pending(session, answer)
            except BaseException:  # also an interrupt: the reply is still to come
                connection.close()
                raise


class AsyncMySqlSessionDriver(session_aio.AsyncSessionDriver[bytes, MySqlReply]):
    """The variant for the tasks of one event loop."""

    async def begin(self, session: MySqlSession, sql: bytes, until: float) -> MySqlReply | None:
        await lock(session, until)
        connection = session.connection
        try:
            connection.send(sql)
            session.pending = True
            answer = await receive(session, until, connection.waits)
            waits = answer is None and connection.waits()
            return None if waits else take_pending(session, answer)
        except BaseException:  # late or cancelled: the reply is still to come
            remove_reader(session)
            connection.close()
            raise
        finally:
            session.mutex.release()
            session.wake_waiter()


def open_session(dialler: MySqlDialler, until: float) -> MySqlConnection:
    """Opens a connection that holds a named lock, by which other sessions find and kill it."""
    connection = dialler.connect_to_namespace(until)
    try:
        tag = secrets.token_hex(12)
        sql = b"SELECT GET_LOCK(%s, 0), CONNECTION_ID()" % session_lock(tag)
        ((got, number),) = connection.checked(connection.request(sql, until))[0].rows
        if got != b"1":
            raise Unsupported(f"{dialler.address.display} has no named locks (GET_LOCK)")
        connection.tag, connection.number = tag, int(number or 0)
    except BaseException:
        connection.close()
        raise
    return connection

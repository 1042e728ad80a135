"""A connection to MySQL or MariaDB: sends requests and reads replies on a non-blocking socket.

PyMySQL logs in (``connect``): host name, TLS, handshake. From then on we use its socket directly,
for threads and for event loops: a packed request and an incremental parser cost a third of a
PyMySQL cursor, and a reply can be read to its end after its caller has gone.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from contextlib import suppress
from typing import Any

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql import connection as sql
from holdfast.stores._sql import session as sql_session
from holdfast.stores._sql.connection import Dropped, SqlPool
from holdfast.stores.mysql.protocol import MySqlReply, ReplyParser, Result, packed

__all__ = [
    "MySqlConnection",
    "MySqlPool",
    "MySqlRefused",
    "MySqlSession",
    "MySqlSessions",
    "checked",
    "mark_of",
]

INTERRUPTED = 1317
_GONE = frozenset({1053, 1152, 1153, 1159, 1160, 1161, 1290, 1836, 1927, 3032, 3169, 4031})
"""Error numbers after which a connection is closed: the server ends it, or is read-only."""
NO_RIGHTS = frozenset({1044, 1142, 1143, 1227, 1410})
READ_BYTES = 65536
_QUIT = b"\1\0\0\0\1"
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# Connections forgotten in the process that opened them. A reference keeps the garbage collector
# from closing the socket, which would end the session on the server.
_forgotten: list[MySqlConnection] = []


class MySqlRefused(sql.SqlRefused):
    """The server answered with an error; ``code`` is its number. ``first`` says that no statement
    of the request ran before the error."""

    def __init__(self, message: str, code: int, *, first: bool = False) -> None:
        super().__init__(message, final=first and code in NO_RIGHTS)
        self.code = code


class MySqlConnection(sql.SqlConnection[bytes, MySqlReply]):
    """One session. Used by one caller at a time."""

    __slots__ = ("_client", "_parser", "_socket", "_tls", "number", "tag", "ttl")

    def __init__(self, client: Any, server: str) -> None:
        super().__init__(client._sock.fileno(), server)
        self._client = client
        self._socket: socket.socket | None = client._sock
        self._tls = isinstance(client._sock, ssl.SSLSocket)
        self.number: int = client.thread_id()
        """The session's number (connection id), from the login."""
        self.tag = ""
        """Identifies the session by a named lock that it holds; empty if it has none."""
        self.ttl = 0
        """The session's ``wait_timeout`` in seconds; 0 if it was not set."""
        self._parser = ReplyParser()
        client._sock.settimeout(0)

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def open(self) -> bool:
        return self._socket is not None

    def unblock(self) -> None:
        """Does nothing: the socket never blocks."""

    def send(self, request: bytes) -> None:
        """Sends a request, as much as the socket accepts (``flush`` sends the rest). The reply
        must be collected before the next request."""
        self._outgoing = packed(request)
        self.flush()

    @property
    def sent(self) -> bool:
        """True if nothing is left to ``flush``."""
        return not self._outgoing

    def wait_writable(self, until: float) -> bool:
        """Waits until the socket is writable or broken; False at the deadline. Has a poll object
        of its own, since another thread may call ``has_input`` at the same time."""
        poll = select.poll()
        with suppress(ValueError):  # the socket is closed
            poll.register(self.fileno(), select.POLLOUT)
            return bool(poll.poll(max(0.0, until - now()) * 1000 + 1))
        return True

    def flush(self) -> bool:
        sock = self._socket  # another thread may close it
        if sock is None:
            raise Dropped(f"{self.server}: the connection is closed")
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[sock.send(self._outgoing) :]
        except _AGAIN:
            return False
        except OSError as error:
            raise self.dropped(error) from None
        return True

    def collect(self) -> MySqlReply | None:
        while (sock := self._socket) is not None:
            try:
                data = sock.recv(READ_BYTES)
                if not data:
                    raise self.dropped("it was closed")
                reply = self._parser.feed(data)
                if reply is None and len(data) < READ_BYTES and not self._tls:
                    return None  # the socket has no more data
            except _AGAIN:
                return None
            except (OSError, ValueError) as error:
                if isinstance(error, BackendUnavailable):
                    raise
                raise self.dropped(error) from None
            if reply is not None:
                self._judge(reply)
                return reply
        raise Dropped(f"{self.server}: the connection is closed")

    def arrived(self) -> MySqlReply | None:
        return self.collect()  # an error packet that ends the session is a reply, too

    def waits(self) -> bool:
        """True if the first result of a pending reply is not 1: the rest of the request waits on
        the server (``MySqlSessionDriver.begin``)."""
        begun = self._parser.begun
        return len(begun) == 1 and begun[0].rows != [(b"1",)]

    def reply_started(self) -> bool:
        """True if a second result has arrived: the wait is over and the rest will follow."""
        return len(self._parser.begun) > 1

    def _judge(self, reply: MySqlReply) -> None:
        """Closes the connection if an error left a transaction open, or ends the session."""
        if reply.failure is not None and (reply.in_transaction or reply.failure.code in _GONE):
            self.close()

    def checked(self, answer: MySqlReply) -> list[Result]:
        """Returns the results; raises ``MySqlRefused`` for an error."""
        return checked(answer, self.server)

    def for_caller(self, answer: MySqlReply) -> MySqlReply:
        """Returns the reply unchecked: some statements may have run before the error."""
        return answer

    def has_input(self) -> bool:
        return self._socket is None or bool(self._poll.poll(0))

    def is_alive(self) -> bool:
        return not self.has_input()

    def close(self) -> None:
        if self._socket is not None and self._made_in:
            with suppress(OSError, ValueError):
                self._socket.send(_QUIT)
            self._socket = None
            self._client._force_close()

    def sever(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        if self._socket is None:
            return
        made_in, self._made_in = self._made_in, 0
        self._socket = None
        if os.getpid() == made_in:
            _forgotten.append(self)
        else:
            self._client._force_close()


MySqlSession = sql_session.SqlSession[MySqlConnection]
MySqlSessions = sql_session.SessionRegistry[MySqlConnection]
MySqlPool = SqlPool[bytes, MySqlReply]


def mark_of(session: MySqlSession) -> int:
    """Identifies a hold of a session, as one number: the session's number and its parity."""
    return session.connection.number * 2 + session.parity


def checked(reply: MySqlReply, server: str) -> list[Result]:
    """Returns the results; raises ``MySqlRefused`` for an error."""
    if reply.failure is None:
        return reply.results
    code, text = reply.failure
    first = not reply.results
    raise MySqlRefused(f"{server} refused: {text} ({code})", code, first=first)

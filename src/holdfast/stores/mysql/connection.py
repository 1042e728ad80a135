"""A connection to MySQL or MariaDB, as a protocol of ``io``.

PyMySQL logs in (``connect``). From then on we use its socket directly: a packed request and an
incremental parser cost a third of a PyMySQL cursor, and a reply can be read to its end after its
caller has gone.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.io.connection import PENDING, Stream
from holdfast.stores._sql import connection as sql
from holdfast.stores._sql import session as sql_session
from holdfast.stores.mysql.protocol import MySqlReply, ReplyParser, Result, packed

if TYPE_CHECKING:
    import socket

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
_QUIT = b"\1\0\0\0\1"


class MySqlRefused(sql.SqlRefused):
    """The server answered with an error; ``code`` is its number. ``first`` says that no statement
    of the request ran before the error."""

    def __init__(self, message: str, code: int, *, first: bool = False) -> None:
        super().__init__(message, final=first and code in NO_RIGHTS)
        self.code = code


class MySqlConnection(sql.SqlConnection, Stream):
    """One session, over the socket of a login (``connect``)."""

    def __init__(self, sock: socket.socket, number: int, server: str) -> None:
        super().__init__(sock)
        self._watch()
        self.server = server
        self.number = number
        """The session's number (connection id), from the login."""
        self.tag = ""
        """Identifies the session by a named lock that it holds; empty if it has none."""
        self.ttl = 0
        """The session's ``wait_timeout`` in seconds; 0 if it was not set."""
        self._parser = ReplyParser()
        self._replies: deque[MySqlReply] = deque()

    def send(self, request: bytes) -> None:
        try:
            super().send(packed(request))
        except OSError as error:
            raise self.dropped(error) from None

    def flush(self) -> bool:
        try:
            return super().flush()
        except OSError as error:
            raise self.dropped(error) from None

    def collect(self) -> None:
        try:
            super().collect()
        except (OSError, ValueError) as error:
            raise self.dropped(error) from None

    def feed(self, data: bytes) -> None:
        while (reply := self._parser.feed(data)) is not None:
            failure, data = reply.failure, b""
            # An error left a transaction open, or ends the session.
            if failure is not None and (reply.in_transaction or failure.code in _GONE):
                self.usable = False
            self._replies.append(reply)

    def next(self) -> Any:
        return self._replies.popleft() if self._replies else PENDING

    def waits(self) -> bool:
        """True if the first result of a pending reply is not 1: the rest of the request waits on
        the server (``SessionDriver.begin``)."""
        begun = self._parser.begun
        return len(begun) == 1 and begun[0].rows != [(b"1",)]

    def reply_started(self) -> bool:
        """True if a second result has arrived: the wait is over and the rest will follow."""
        return len(self._parser.begun) > 1

    def checked(self, reply: MySqlReply) -> list[Result]:
        """Returns the results; raises ``MySqlRefused`` for an error."""
        return checked(reply, self.server)

    def for_caller(self, reply: MySqlReply) -> MySqlReply:
        """Returns the reply unchecked: some statements may have run before the error."""
        return reply

    def close(self) -> None:
        if self.open:
            with suppress(OSError, ValueError):
                self._write(_QUIT)
        super().close()


MySqlSession = sql_session.SqlSession[MySqlConnection]
MySqlSessions = sql_session.SessionRegistry[MySqlConnection]
MySqlPool = sql.SqlPool[bytes, MySqlReply]


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

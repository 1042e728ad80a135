"""MySQL and MariaDB: connections and answers. The blocking requests are here too.

PyMySQL opens a connection (``mysql_login``): name, TLS, login. From then on its socket is ours, in
both worlds: pre-packed requests and an answer read as it comes cost a third of a cursor's, and a
request whose caller is gone can be read to its end. The asyncio wire lets a thread open one.
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
from holdfast.stores._sql import wire as sql_wire
from holdfast.stores._sql.connection import Dropped
from holdfast.stores.mysql.protocol import Parser, Reply, Result, packed

__all__ = ["Connection", "Refused", "Session", "Sessions", "Wire", "checked", "mark_of"]

INTERRUPTED = 1317
UNKNOWN_THREAD = 1094
_GONE = frozenset({1053, 1152, 1153, 1159, 1160, 1161, 1290, 1836, 1927, 3032, 3169, 4031})
"""Answers after which a connection is of no more use: the server ends it, or can't write."""
READ_BYTES = 65536
_QUIT = b"\1\0\0\0\1"
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# In the same process, what is forgotten must not be closed either: the server would hear of it.
_forgotten: list[Connection] = []


class Refused(sql.SqlRefused):
    """The server answered with an error; ``code`` is its number."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Connection(sql.SqlConnection[bytes, Reply]):
    """One session. Used by one caller at a time."""

    __slots__ = ("_client", "_parser", "_socket", "_tls", "number", "tag", "ttl")

    def __init__(self, client: Any, server: str) -> None:
        super().__init__(client._sock.fileno(), server)
        self._client = client
        self._socket: socket.socket | None = client._sock
        self._tls = isinstance(client._sock, ssl.SSLSocket)
        self.number: int = client.thread_id()
        """The session's number as the login said."""
        self.tag = ""
        """A named lock that the session has, where others must be able to find it."""
        self.ttl = 0
        """How many seconds the session may be idle, where that was set."""
        self._parser = Parser()
        client._sock.settimeout(0)

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def open(self) -> bool:
        return self._socket is not None

    def unblock(self) -> None:
        """It never waits for room."""

    def send(self, request: bytes) -> None:
        """Sends a request, or begins to (``flush``); its answer must come before the next."""
        self._outgoing = packed(request)
        self.flush()

    @property
    def sent(self) -> bool:
        """Whether nothing is left to ``flush``."""
        return not self._outgoing

    def has_room(self, until: float) -> bool:
        """Waits for room to send; whether there is some, or the connection broke. Unlike all else
        here, while somebody else may look whether it ``stirs``."""
        poll = select.poll()
        with suppress(ValueError):  # it is closed
            poll.register(self.fileno(), select.POLLOUT)
            return bool(poll.poll(max(0.0, until - now()) * 1000 + 1))
        return True

    def flush(self) -> bool:
        wire = self._socket  # another thread may close it
        if wire is None:
            raise Dropped(f"{self.server}: the connection is closed")
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[wire.send(self._outgoing) :]
        except _AGAIN:
            return False
        except OSError as error:
            raise self.dropped(error) from None
        return True

    def collect(self) -> Reply | None:
        while (wire := self._socket) is not None:
            try:
                data = wire.recv(READ_BYTES)
                if not data:
                    raise self.dropped("it was closed")
                reply = self._parser.feed(data)
                if reply is None and len(data) < READ_BYTES and not self._tls:
                    return None  # there is no more
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

    def arrived(self) -> Reply | None:
        return self.collect()  # a last word is an answer

    def waits(self) -> bool:
        """Whether the request said no at first, and now waits on the server (``Talk.begin``)."""
        begun = self._parser.begun
        return len(begun) == 1 and begun[0].rows != [(b"1",)]

    def reply_started(self) -> bool:
        """Whether a request that waited does so no more, and the rest of its answer comes."""
        return len(self._parser.begun) > 1

    def _judge(self, reply: Reply) -> None:
        """A transaction that an error cut short ends with its connection."""
        if reply.failure is not None and (reply.in_transaction or reply.failure.code in _GONE):
            self.close()

    def checked(self, answer: Reply) -> list[Result]:
        """The results, or what the answer says is wrong, raised."""
        return checked(answer, self.server)

    def for_caller(self, answer: Reply) -> Reply:
        """As it is: of a request that failed, some statements may have run."""
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


Session = sql_session.Session[Connection]
Sessions = sql_session.Sessions[Connection]
Wire = sql_wire.Wire[bytes, Reply]


def mark_of(session: Session) -> int:
    """Which hold of which session, in one number."""
    return session.connection.number * 2 + session.parity


def checked(reply: Reply, server: str) -> list[Result]:
    """The results, or what the answer says is wrong, raised."""
    if reply.failure is None:
        return reply.results
    code, text = reply.failure
    raise Refused(f"{server} refused: {text} ({code})", code)

"""MySQL and MariaDB: addresses, connections, answers. The blocking requests are here too.

PyMySQL opens a connection: name, TLS, login. From then on its socket is ours, in both worlds:
pre-packed requests and an answer read as it comes cost a third of a cursor's, and a request
whose caller is gone can be read to its end. The asyncio wire lets a thread open a connection.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pymysql
from pymysql.constants import CLIENT

from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.wires.mysql_protocol import Parser, Reply, Result, packed

__all__ = ["Address", "Connection", "Dial", "Dropped", "Refused", "dial"]

INTERRUPTED = 1317
UNKNOWN_THREAD = 1094
_GONE = frozenset({1053, 1152, 1153, 1159, 1160, 1161, 1290, 1836, 1927, 3032, 3169, 4031})
"""Answers after which a connection is of no more use: the server ends it, or can't write."""
READ_BYTES = 65536
_QUIT = b"\1\0\0\0\1"
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# In the same process, what is forgotten must not be closed either: the server would hear of it.
_forgotten: list[Connection] = []


class Refused(BackendUnavailable):
    """The server answered with an error; ``code`` is its number."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Dropped(BackendUnavailable):
    """The connection ended, from whichever side."""


class Address(NamedTuple):
    """Where a server is and how to log in; ``parameters`` are PyMySQL's and may be secret."""

    hosts: tuple[tuple[str, int | None], ...]
    parameters: dict[str, Any]
    display: str


class Connection:
    """One session. Used by one caller at a time."""

    __slots__ = (
        "__weakref__",
        "_client",
        "_made_in",
        "_outgoing",
        "_parser",
        "_poll",
        "_socket",
        "_tls",
        "home",
        "number",
        "server",
        "tag",
        "ttl",
    )

    def __init__(self, client: Any, server: str) -> None:
        self._client = client
        self._socket: socket.socket | None = client._sock
        self._tls = isinstance(client._sock, ssl.SSLSocket)
        self.server = server
        self.number: int = client.thread_id()
        """The session's number as the login said."""
        self.tag = ""
        """A named lock that the session has, where others must be able to find it."""
        self.ttl = 0
        """How many seconds the session may be idle, where that was set."""
        self.home: object = None
        """The wire that it goes back to after use."""
        self._parser = Parser()
        self._outgoing = b""
        client._sock.settimeout(0)
        self._poll = select.poll()
        self._poll.register(client._sock, select.POLLIN)
        self._made_in = os.getpid()  # 0 once it is forgotten

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def open(self) -> bool:
        return self._socket is not None

    def send(self, sql: bytes) -> None:
        """Sends a request, or begins to (``flush``); its answer must come before the next."""
        self._outgoing = packed(sql)
        self.flush()

    def flush(self) -> bool:
        """Sends what is left to send; whether all of it is gone."""
        if self._socket is None:
            raise Dropped(f"{self.server}: the connection is closed")
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except _AGAIN:
            return False
        except OSError as error:
            raise self.dropped(error) from None
        return True

    def collect(self) -> Reply | None:
        """Reads what has come; the answer once it is complete."""
        while self._socket is not None:
            try:
                data = self._socket.recv(READ_BYTES)
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

    def waits(self) -> bool:
        """Whether the request said no at first, and now waits on the server (``Talk.begin``)."""
        begun = self._parser.begun
        return len(begun) == 1 and begun[0].rows != [(b"1",)]

    def comes(self) -> bool:
        """Whether a request that waited does so no more, and the rest of its answer comes."""
        return len(self._parser.begun) > 1

    def _judge(self, reply: Reply) -> None:
        """A transaction that an error cut short ends with its connection."""
        if reply.failure is not None and (reply.in_transaction or reply.failure.code in _GONE):
            self.close()

    def request(self, sql: bytes, until: float) -> Reply:
        """One request and its answer; a connection that did not answer in time is closed."""
        try:
            self.send(sql)
            while self._outgoing:
                if not self._ready(select.POLLOUT | select.POLLIN, until):
                    raise self.broken("no room to send")
                self.flush()
            reply = self.receive(until)
            if reply is None:
                raise self.broken("no answer in time")
            return reply
        except BaseException:  # also an interrupt: the answer is still to come
            self.close()
            raise

    def _ready(self, events: int, until: float) -> bool:
        self._poll.modify(self.fileno(), events)
        try:
            return bool(self._poll.poll(max(0.0, until - now()) * 1000 + 1))
        finally:
            self._poll.modify(self.fileno(), select.POLLIN)

    def receive(self, until: float, *, begun: bool = False) -> Reply | None:
        """The answer, or nothing if it is not complete by then; or has begun, and waits."""
        while True:
            left = until - now()
            if not self._poll.poll(left * 1000 + 1 if left > 0 else 0):
                return None
            reply = self.collect()
            if reply is not None or (begun and self.waits()):
                return reply

    def checked(self, reply: Reply) -> list[Result]:
        """The results, or what the answer says is wrong, raised."""
        return checked(reply, self.server)

    def broken(self, cause: str) -> BackendUnavailable:
        """The error for a request that was not answered."""
        return BackendUnavailable(f"{self.server} did not answer: {cause.strip()}")

    def dropped(self, cause: object) -> Dropped:
        """The error for a connection that broke; closes it."""
        self.close()
        return Dropped(f"{self.server} dropped the connection: {str(cause).strip()}")

    def stirs(self) -> bool:
        """Whether something came in without being asked for: the session's end, mostly."""
        return self._socket is None or bool(self._poll.poll(0))

    def close(self) -> None:
        if self._socket is not None and self._made_in:
            with suppress(OSError, ValueError):
                self._socket.send(_QUIT)
            self._socket = None
            self._client._force_close()

    def sever(self) -> None:
        """Ends it for whoever reads it, who then closes it. From any thread."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """In a forked child: lets go of the socket without a word to the server."""
        if self._socket is None:
            return
        made_in, self._made_in = self._made_in, 0
        self._socket = None
        if os.getpid() == made_in:
            _forgotten.append(self)
        else:
            self._client._force_close()


Dial = Callable[[float], Connection]
"""Opens, checks and prepares a connection by then, by blocking calls."""


def checked(reply: Reply, server: str) -> list[Result]:
    """The results, or what the answer says is wrong, raised."""
    if reply.failure is None:
        return reply.results
    code, text = reply.failure
    raise Refused(f"{server} refused: {text} ({code})", code)


def dial(address: Address, until: float) -> Connection:
    """Connects to the first of the hosts that answers."""
    error: BackendUnavailable | None = None
    for host, port in address.hosts or (("", None),):
        try:
            return _connect(address, host, port, until)
        except BackendUnavailable as failure:
            error = failure
    raise error or BackendUnavailable(f"{address.display}: no host")


def _connect(address: Address, host: str, port: int | None, until: float) -> Connection:
    left = until - now()
    if left <= 0:
        raise BackendUnavailable(f"{address.display} did not answer the login in time")
    given: dict[str, Any] = {"host": host, "port": port or 3306} if host else {}
    try:
        client = pymysql.connect(
            **given,
            **address.parameters,
            connect_timeout=left,
            read_timeout=left,
            write_timeout=left,
            client_flag=CLIENT.MULTI_STATEMENTS,
            autocommit=None,
            local_infile=False,
        )
    except pymysql.MySQLError as error:
        raise BackendUnavailable(f"{address.display} can't be reached: {_text(error)}") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise BackendUnavailable(f"{address.display} can't be reached: {error}") from None
    return Connection(client, address.display)


def _text(error: Exception) -> str:
    return str(error.args[-1]) if error.args else type(error).__name__

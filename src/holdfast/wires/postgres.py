"""PostgreSQL over libpq: addresses, connections, answers. The blocking requests are here too.

Requests go straight to psycopg's ``pq`` layer, a third of the cost of a cursor's. A connection
is opened, checked and prepared by blocking calls; the asyncio wire lets a thread do that and
then takes the open connection over.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from psycopg import Error as PsycopgError
from psycopg import pq
from psycopg.conninfo import make_conninfo

from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.wires.postgres_statement import Statement

__all__ = [
    "Address",
    "Connection",
    "Dial",
    "Dropped",
    "Refused",
    "dial",
    "first_value",
]

READ_ONLY = "25006"
NO_RIGHTS = "42501"
_GONE = ("57P", "08", READ_ONLY)
"""Answers after which a connection is of no more use: the server ends it, or can't write."""
_ROWS = frozenset({pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY})
# In the same process, what is forgotten must not be closed either: the server would hear of it.
_forgotten: list[Connection] = []


class Refused(BackendUnavailable):
    """The server answered with an error; ``sqlstate`` is its code."""

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class Dropped(BackendUnavailable):
    """The connection ended, from whichever side: its session has ended or will."""


class Address(NamedTuple):
    """Where a server is and how to log in; ``parameters`` are libpq's and may be secret."""

    hosts: tuple[tuple[str, int | None], ...]
    parameters: dict[str, str]
    display: str


class Connection:
    """One session. Used by one caller at a time."""

    __slots__ = (
        "__weakref__",
        "_answer",
        "_made_in",
        "_poll",
        "home",
        "known",
        "pgconn",
        "pid",
        "pooled",
        "server",
        "started",
    )

    def __init__(self, pgconn: pq.abc.PGconn, server: str) -> None:
        self.pgconn = pgconn
        self.server = server
        self.pid = pgconn.backend_pid
        """As the login said; a pooler makes one up."""
        self.started = ""
        """When the session began, by the server's clock: tells it from a later one of its pid."""
        self.pooled = False
        """Whether a pooler stands between, so that sessions are not ours."""
        self.home: object = None
        """The wire that it goes back to after use."""
        self.known: frozenset[bytes] = frozenset()
        """The names of the statements that are prepared here."""
        self._answer: pq.abc.PGresult | None = None
        self._poll = select.poll()
        self._poll.register(pgconn.socket, select.POLLIN)
        self._made_in = os.getpid()  # 0 once it is forgotten

    def fileno(self) -> int:
        return self.pgconn.socket

    @property
    def open(self) -> bool:
        return self._made_in != 0 and self.pgconn.status == pq.ConnStatus.OK

    def send(self, statement: Statement, parameters: Sequence[bytes | None]) -> None:
        """Sends a request; its answer must be collected before the next."""
        try:
            if statement.name in self.known:
                self.pgconn.send_query_prepared(statement.name, parameters)
            else:
                self.pgconn.send_query_params(statement.sql, parameters)
        except PsycopgError as error:
            raise self.dropped(error) from None

    def collect(self) -> pq.abc.PGresult | None:
        """Reads what has come; the answer once it is complete."""
        pgconn = self.pgconn
        try:
            pgconn.consume_input()
        except PsycopgError as error:
            raise self.dropped(error) from None
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                answer, self._answer = self._answer, None
                if answer is None:
                    raise self.dropped("it ended without an answer")
                return answer
            if self._answer is None or self._answer.status in _ROWS:
                self._answer = result
        return None

    def request(
        self, statement: Statement, parameters: Sequence[bytes | None], until: float
    ) -> pq.abc.PGresult:
        """One request and its answer; a connection that did not answer in time is closed."""
        try:
            self.send(statement, parameters)
            return self.checked(self._await(until))
        except Refused:
            raise
        except BaseException:  # also an interrupt: the answer is still to come
            self.close()
            raise

    def script(self, sql: bytes, until: float) -> pq.abc.PGresult:
        """Several statements without parameters in one request; the last one's answer."""
        try:
            self.pgconn.send_query(sql)
            return self.checked(self._await(until))
        except Refused:
            raise
        except PsycopgError as error:
            raise self.dropped(error) from None
        except BaseException:
            self.close()
            raise

    def receive(self, until: float) -> pq.abc.PGresult | None:
        """The answer, or nothing if it is not complete by then."""
        while True:
            left = until - now()
            if not self._poll.poll(left * 1000 + 1 if left > 0 else 0):
                return None
            answer = self.collect()
            if answer is not None:
                return answer

    def _await(self, until: float) -> pq.abc.PGresult:
        answer = self.receive(until)
        if answer is None:
            raise self.broken("no answer in time")
        return answer

    def checked(self, answer: pq.abc.PGresult) -> pq.abc.PGresult:
        """The answer, or what it says is wrong, raised."""
        if answer.status in _ROWS:
            return answer
        state = (answer.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        text = (answer.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(
            errors="replace"
        ) or answer.get_error_message()
        if state.startswith(_GONE):
            self.close()
        raise Refused(f"{self.server} refused: {text} ({state})", state)

    def broken(self, cause: str) -> BackendUnavailable:
        """The error for a request that was not answered."""
        return BackendUnavailable(f"{self.server} did not answer: {cause.strip()}")

    def dropped(self, cause: object) -> Dropped:
        """The error for a connection that broke; closes it."""
        self.close()
        return Dropped(f"{self.server} dropped the connection: {str(cause).strip()}")

    def stirs(self) -> bool:
        """Whether something came in without being asked for: the session's end, mostly."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        if self._made_in:
            self.pgconn.finish()

    def sever(self) -> None:
        """Ends it for whoever reads it, who then closes it. From any thread."""
        if self.open:
            with suppress(OSError), socket.socket(fileno=os.dup(self.pgconn.socket)) as ours:
                ours.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """In a forked child: lets go of the socket without a word to the server."""
        if not self.open:
            return
        made_in, self._made_in = self._made_in, 0
        if os.getpid() != made_in:
            os.close(self.pgconn.socket)  # psycopg never finishes what another process made
        _forgotten.append(self)


Dial = Callable[..., Connection]
"""Opens, checks and prepares a connection, by blocking calls."""


def first_value(answer: pq.abc.PGresult) -> bytes:
    """The first column of the first row; empty for a null."""
    return answer.get_value(0, 0) or b""


def dial(address: Address, until: float, greet: Callable[[Connection], None]) -> Connection:
    """Connects to the first of the hosts that answers and that ``greet`` does not raise for."""
    error: BackendUnavailable | None = None
    for parameters in _targets(address):
        try:
            connection = _connect(address, parameters, until)
        except BackendUnavailable as failure:
            error = failure
            continue
        try:
            greet(connection)
        except BaseException as failure:
            connection.close()
            if not isinstance(failure, BackendUnavailable):
                raise
            error = failure
        else:
            return connection
    raise error or BackendUnavailable(f"{address.display}: no host")


def _targets(address: Address) -> list[dict[str, str]]:
    """One set of libpq's parameters per address. Names are looked up here: libpq would do so
    while it keeps every other thread waiting."""
    targets: list[dict[str, str]] = []
    for host, port in address.hosts or (("", None),):
        base = dict(address.parameters)
        if port is not None:
            base["port"] = str(port)
        if not host or host.startswith("/"):
            targets.append(base | ({"host": host} if host else {}))
            continue
        try:
            found = socket.getaddrinfo(host, port or 5432, type=socket.SOCK_STREAM)
        except OSError as error:
            if host == address.hosts[-1][0] and not targets:
                raise BackendUnavailable(f"{address.display}: {host}: {error.strerror}") from None
            continue
        targets += [base | {"host": host, "hostaddr": str(entry[4][0])} for entry in found]
    return targets


def _connect(address: Address, parameters: dict[str, str], until: float) -> Connection:
    try:
        pgconn = pq.PGconn.connect_start(make_conninfo("", **parameters).encode())
        _finish_login(pgconn, address, until)
    except PsycopgError as error:
        raise BackendUnavailable(f"{address.display} can't be reached: {error}") from None
    return Connection(pgconn, address.display)


def _finish_login(pgconn: pq.abc.PGconn, address: Address, until: float) -> None:
    step = pq.PollingStatus.WRITING
    while step != pq.PollingStatus.OK:
        if step == pq.PollingStatus.FAILED or pgconn.status == pq.ConnStatus.BAD:
            cause = pgconn.get_error_message()
            pgconn.finish()
            raise BackendUnavailable(f"{address.display} can't be reached: {cause.strip()}")
        poll = select.poll()
        poll.register(
            pgconn.socket, select.POLLOUT if step == pq.PollingStatus.WRITING else select.POLLIN
        )
        left = until - now()
        if left <= 0 or not poll.poll(left * 1000 + 1):
            pgconn.finish()
            raise BackendUnavailable(f"{address.display} did not answer the login in time")
        step = pq.PollingStatus(pgconn.connect_poll())

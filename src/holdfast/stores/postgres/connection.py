"""PostgreSQL over libpq: addresses, connections, answers. Blocking requests are here too.

Requests use psycopg's ``pq`` layer directly, at a third of the cost of a cursor. A connection is
opened, checked and prepared with blocking calls; the asyncio pool runs these in a thread and then
uses the open connection itself.
"""

from __future__ import annotations

import os
import re
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from psycopg import Error as PsycopgError
from psycopg import pq
from psycopg.conninfo import make_conninfo

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.sockets import look_up
from holdfast.stores._sql import connection as sql
from holdfast.stores._sql import session as sql_session
from holdfast.stores.postgres.schema import Parameters, Request, Statement

__all__ = [
    "PostgresAddress",
    "PostgresConnection",
    "PostgresRefused",
    "PostgresSession",
    "PostgresSessions",
    "dial",
    "first_value",
]

READ_ONLY = "25006"
NO_RIGHTS = "42501"
_GONE = ("57P", "08", READ_ONLY)
"""Errors after which a connection is useless: the server ends it, or is read-only."""
# libpq gives no error code for a failed login. Servers may write these texts in another language:
# such a refusal counts as one that may pass. LDAP, PAM and RADIUS are left out: with them a server
# that can't reach its own authority says the same as for a wrong password.
_FINAL = re.compile(
    r"(?:password|[Pp]eer|[Ii]dent|certificate|SASL|SCRAM) authentication failed"
    r"|no password supplied|is not permitted to log in|permission denied for database"
    r"|(?:role|database|certificate file) \".*\" does not exist|no such (?:database|user)"
    r"|no pg_hba.conf entry|pg_hba.conf rejects|but SSL was required"
    r"|received invalid response to SSL negotiation|expected authentication request from server"
)
_WHERE = re.compile(r"connection to server .*? failed: |FATAL: +|ERROR: +|\n\s*")
_PARAMETER = re.compile(rb"\$(\d+)")
_ROWS = frozenset({pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY})
# In the same process, a forgotten connection must not be closed: that would tell the server.
_forgotten: list[PostgresConnection] = []


class PostgresRefused(sql.SqlRefused):
    """The server answered with an error; ``sqlstate`` is its code."""

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message, final=sqlstate == NO_RIGHTS)
        self.sqlstate = sqlstate


class PostgresAddress(NamedTuple):
    """Where a server is and how to log in; ``parameters`` are libpq's and may be secret."""

    hosts: tuple[tuple[str, int | None], ...]
    parameters: dict[str, str]
    display: str

    def __repr__(self) -> str:
        return f"PostgresAddress({self.display!r})"


class PostgresConnection(sql.SqlConnection[Request, pq.abc.PGresult]):
    """One connection over libpq. Used by one caller at a time."""

    __slots__ = ("_answer", "isolated", "known", "pgconn", "pid", "pooled", "started")

    def __init__(self, pgconn: pq.abc.PGconn, server: str) -> None:
        super().__init__(pgconn.socket, server)
        self.pgconn = pgconn
        self.pid = pgconn.backend_pid
        """The process id from the login; a pooler invents one."""
        self.started = ""
        """When the session began, by the server's clock: a later session may have the same pid."""
        self.pooled = False
        """True behind a pooler: the session on the server is not ours alone."""
        self.isolated = False
        """True if every request must set the isolation level of its transaction: behind a pooler,
        for a role whose default is not read committed."""
        self.known: frozenset[bytes] = frozenset()
        """The names of the statements that are prepared here."""
        self._answer: pq.abc.PGresult | None = None

    def fileno(self) -> int:
        return self.pgconn.socket

    @property
    def open(self) -> bool:
        return self._made_in != 0 and self.pgconn.status == pq.ConnStatus.OK

    def unblock(self) -> None:
        self.pgconn.nonblocking = 1

    def send(self, request: Request) -> None:
        statement, parameters = request
        try:
            if self.isolated and statement.sql.startswith(b"SELECT "):
                self.pgconn.send_query(self._read_committed(statement.sql, parameters))
            elif statement.name in self.known:
                self.pgconn.send_query_prepared(statement.name, parameters)
            else:
                self.pgconn.send_query_params(statement.sql, parameters)
        except PsycopgError as error:
            raise self.dropped(error) from None

    def _read_committed(self, sql: bytes, parameters: Parameters) -> bytes:
        """Returns a script, which is one transaction: nothing outlasts it in the pooler's session.
        A script takes no parameters, so they are written into it as literals."""
        escaping = pq.Escaping(self.pgconn)
        values = [
            b"NULL" if value is None else bytes(escaping.escape_literal(value))
            for value in parameters
        ]
        filled = _PARAMETER.sub(lambda found: values[int(found[1]) - 1], sql)
        return b"SET TRANSACTION ISOLATION LEVEL READ COMMITTED; " + filled

    def flush(self) -> bool:
        try:
            return not self.pgconn.flush()
        except PsycopgError as error:
            raise self.broken(str(error)) from None

    def collect(self) -> pq.abc.PGresult | None:
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

    def reply_started(self) -> bool:
        """Always False: libpq does not say whether an answer has started to arrive."""
        return False

    def request(self, request: Request, until: float) -> pq.abc.PGresult:
        return self.checked(super().request(request, until))

    def script(self, sql: bytes, until: float) -> pq.abc.PGresult:
        """Sends several statements without parameters in one request; returns the last answer."""
        return self._execute(lambda: self.pgconn.send_query(sql), until)

    def prepare(self, statement: Statement, until: float) -> None:
        """Prepares a statement on the server under its name."""
        self._execute(lambda: self.pgconn.send_prepare(statement.name, statement.sql), until)

    def _execute(self, send: Callable[[], None], until: float) -> pq.abc.PGresult:
        try:
            send()
            answer = self.receive(until)
            if answer is None:
                raise self.broken("no answer in time")
        except PsycopgError as error:
            raise self.dropped(error) from None
        except BaseException:
            self.close()
            raise
        return self.checked(answer)

    def checked(self, answer: pq.abc.PGresult) -> pq.abc.PGresult:
        """Returns the answer; raises ``PostgresRefused`` if it is an error."""
        if answer.status in _ROWS:
            return answer
        state = (answer.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        text = (answer.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(
            errors="replace"
        ) or answer.get_error_message()
        if state.startswith(_GONE):
            self.close()
        raise PostgresRefused(f"{self.server} refused: {text} ({state})", state)

    for_caller = checked

    def is_alive(self) -> bool:
        """Reads the input first: it may also be a notice or a changed setting."""
        if not self.has_input():
            return True
        try:
            self.pgconn.consume_input()
        except PsycopgError:
            self.close()
        return self.open and not self.has_input()

    def close(self) -> None:
        if self._made_in:
            self.pgconn.finish()

    def sever(self) -> None:
        if self.open:
            with suppress(OSError), socket.socket(fileno=os.dup(self.pgconn.socket)) as ours:
                ours.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        if not self.open:
            return
        made_in, self._made_in = self._made_in, 0
        if os.getpid() != made_in:
            os.close(self.pgconn.socket)  # psycopg never closes another process's connection
        _forgotten.append(self)


PostgresSession = sql_session.SqlSession[PostgresConnection]
PostgresSessions = sql_session.SessionRegistry[PostgresConnection]


def first_value(answer: pq.abc.PGresult) -> bytes:
    """Returns the first column of the first row; empty for a null."""
    return answer.get_value(0, 0) or b""


def dial(
    address: PostgresAddress, until: float, greet: Callable[[PostgresConnection], None]
) -> PostgresConnection:
    """Connects to the first host that answers and for which ``greet`` does not raise."""
    failures = sql.HostFailures(address.display)
    for parameters in _targets(address, until):
        host = parameters.get("host", ""), parameters.get("port")
        try:
            connection = _connect(address, parameters, until)
        except BackendUnavailable as failure:
            failures.add(host, failure)
            continue
        try:
            greet(connection)
        except BaseException as failure:
            connection.close()
            if not isinstance(failure, BackendUnavailable):
                raise
            failures.add(host, failure)
        else:
            return connection
    raise failures.error()


def _targets(address: PostgresAddress, until: float) -> list[dict[str, str]]:
    """Returns one set of libpq's parameters per IP address. Host names are resolved here: libpq
    would block all other threads during that, without a time limit."""
    targets: list[dict[str, str]] = []
    for host, port in address.hosts or (("", None),):
        base = dict(address.parameters)
        if port is not None:
            base["port"] = str(port)
        if not host or host.startswith("/"):
            targets.append(base | ({"host": host} if host else {}))
            continue
        try:
            found = look_up(host, port or 5432, until)
        except OSError as error:
            if host == address.hosts[-1][0] and not targets:
                raise BackendUnavailable(f"{address.display}: {host}: {error.strerror}") from None
            continue
        targets += [base | {"host": host, "hostaddr": str(entry[4][0])} for entry in found]
    return targets


def _connect(
    address: PostgresAddress, parameters: dict[str, str], until: float
) -> PostgresConnection:
    try:
        pgconn = pq.PGconn.connect_start(make_conninfo("", **parameters).encode())
        _finish_login(pgconn, address, until)
    except PsycopgError as error:
        raise _login_error(address, str(error)) from None
    return PostgresConnection(pgconn, address.display)


def _finish_login(pgconn: pq.abc.PGconn, address: PostgresAddress, until: float) -> None:
    step = pq.PollingStatus.WRITING
    while step != pq.PollingStatus.OK:
        if step == pq.PollingStatus.FAILED or pgconn.status == pq.ConnStatus.BAD:
            cause = pgconn.get_error_message()
            pgconn.finish()
            raise _login_error(address, cause)
        poll = select.poll()
        poll.register(
            pgconn.socket, select.POLLOUT if step == pq.PollingStatus.WRITING else select.POLLIN
        )
        left = until - now()
        if left <= 0 or not poll.poll(left * 1000 + 1):
            pgconn.finish()
            raise BackendUnavailable(f"{address.display} did not answer the login in time")
        step = pq.PollingStatus(pgconn.connect_poll())


def _login_error(address: PostgresAddress, cause: str) -> BackendUnavailable:
    """Returns the error for a failed login: a refusal if trying again can't help."""
    if not _FINAL.search(cause):
        return BackendUnavailable(f"{address.display} can't be reached: {cause.strip()}")
    text = _WHERE.sub(" ", cause).strip()
    if "SSL negotiation" in text or "authentication request" in text:
        text = f"no PostgreSQL server is at this address: {text}"
    return BackendUnavailable(f"{address.display} refused: {text}", final=True)

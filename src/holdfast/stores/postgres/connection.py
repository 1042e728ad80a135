"""PostgreSQL over libpq, as a protocol of ``io``: addresses, login, requests and replies.

Requests use psycopg's ``pq`` layer directly, at a third of the cost of a cursor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from psycopg import Error as PsycopgError
from psycopg import pq
from psycopg.conninfo import make_conninfo

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.connection import PENDING, READ, WRITE, World
from holdfast.stores._sql import connection as sql
from holdfast.stores._sql import session as sql_session
from holdfast.stores.postgres.schema import Parameters, Request, Statement

__all__ = [
    "PostgresAddress",
    "PostgresConnection",
    "PostgresRefused",
    "PostgresSession",
    "PostgresSessions",
    "Prepare",
    "checked",
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


class Prepare(NamedTuple):
    """A request that prepares a statement on the server under its name."""

    statement: Statement


class PostgresConnection(sql.SqlConnection):
    """One connection over libpq. A request is a statement with its parameters, a ``Prepare``, or a
    script: several statements without parameters, whose last reply counts."""

    def __init__(self, pgconn: pq.abc.PGconn, server: str) -> None:
        self.pgconn, self.server = pgconn, server
        pgconn.nonblocking = 1
        self.fd = pgconn.socket
        self._watch()
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
        self._pending = False
        self._answer: pq.abc.PGresult | None = None

    def send(self, request: AnyRequest) -> None:
        try:
            self._send(request)
            self._pending = True
            self.unsent = bool(self.pgconn.flush())
        except PsycopgError as error:
            raise self.dropped(error) from None

    def _send(self, request: AnyRequest) -> None:
        if isinstance(request, bytes):
            self.pgconn.send_query(request)
            return
        if isinstance(request, Prepare):
            self.pgconn.send_prepare(*request.statement)
            return
        statement, parameters = request
        if self.isolated and statement.sql.startswith(b"SELECT "):
            self.pgconn.send_query(self._read_committed(statement.sql, parameters))
        elif statement.name in self.known:
            self.pgconn.send_query_prepared(statement.name, parameters)
        else:
            self.pgconn.send_query_params(statement.sql, parameters)

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
            self.unsent = bool(self.pgconn.flush())
        except PsycopgError as error:
            raise self.dropped(error) from None
        return not self.unsent

    def collect(self) -> None:
        try:
            self.pgconn.consume_input()
            if not self._pending and self.poll(0):  # the end of a session follows its last message
                self.pgconn.consume_input()
            self._push_notifications()
        except PsycopgError as error:
            raise self.dropped(error) from None

    def _push_notifications(self) -> None:
        if self.on_push is not None:
            while (notification := self.pgconn.notifies()) is not None:
                self.on_push(notification.extra)

    def next(self) -> Any:
        try:
            return self._next() if self._pending else PENDING
        except PsycopgError as error:  # another thread has closed it
            raise self.dropped(error) from None

    def _next(self) -> Any:
        pgconn = self.pgconn
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                answer, self._answer, self._pending = self._answer, None, False
                # Read together with the reply, they stay in libpq's buffer until the reply is
                # taken, and no poll would report them.
                self._push_notifications()
                if answer is None:
                    raise self.dropped("it ended without an answer")
                self.usable = not _sqlstate(answer).startswith(_GONE)
                return answer
            if self._answer is None or self._answer.status in _ROWS:
                self._answer = result
        return PENDING

    def checked(self, reply: pq.abc.PGresult) -> pq.abc.PGresult:
        """Returns the reply; raises ``PostgresRefused`` if it is an error."""
        return checked(reply, self.server)

    for_caller = checked

    def close(self) -> None:
        self.fd = -1
        self.pgconn.finish()

    def forget(self, *, keep_number: bool = False) -> None:
        if self.fd < 0:
            return
        number, self.fd = self.fd, -1
        # First: what ``finish`` says to the server would end the parent's session.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, number)
        os.close(nothing)
        if not keep_number:
            self.pgconn.finish()


def checked(reply: pq.abc.PGresult, server: str) -> pq.abc.PGresult:
    """Returns the reply; raises ``PostgresRefused`` if it is an error."""
    if reply.status in _ROWS:
        return reply
    state = _sqlstate(reply)
    text = (reply.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(
        errors="replace"
    ) or reply.get_error_message()
    raise PostgresRefused(f"{server} refused: {text} ({state})", state)


def _sqlstate(reply: pq.abc.PGresult) -> str:
    """Returns the error code of a reply; empty if it is no error."""
    return (reply.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()


AnyRequest = Request | Prepare | bytes
Greet = Callable[[sql.Opening[PostgresConnection]], Awaitable[None]]
PostgresSession = sql_session.SqlSession[PostgresConnection]
PostgresSessions = sql_session.SessionRegistry[PostgresConnection]


def first_value(answer: pq.abc.PGresult) -> bytes:
    """Returns the first column of the first row; empty for a null."""
    return answer.get_value(0, 0) or b""


async def dial(
    address: PostgresAddress, world: World, until: float, greet: Greet
) -> PostgresConnection:
    """Connects to the first host that answers and for which ``greet`` does not raise."""
    failures = sql.HostFailures(address.display)
    for parameters in await _targets(address, world, until):
        host = parameters.get("host", ""), parameters.get("port")
        try:
            connection = await _connect(address, parameters, world, until)
        except BackendUnavailable as failure:
            failures.add(host, failure)
            continue
        try:
            await greet(sql.Opening(world, connection, until))
        except BaseException as failure:
            connection.close()
            if not isinstance(failure, BackendUnavailable):
                raise
            failures.add(host, failure)
        else:
            return connection
    raise failures.error()


async def _targets(address: PostgresAddress, world: World, until: float) -> list[dict[str, str]]:
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
            found = await world.resolve(host, port or 5432, until)
        except OSError as error:
            if host == address.hosts[-1][0] and not targets:
                raise BackendUnavailable(f"{address.display}: {host}: {error.strerror}") from None
            continue
        targets += [base | {"host": host, "hostaddr": str(entry[4][0])} for entry in found]
    return targets


async def _connect(
    address: PostgresAddress, parameters: dict[str, str], world: World, until: float
) -> PostgresConnection:
    pgconn: pq.abc.PGconn | None = None
    try:
        pgconn = pq.PGconn.connect_start(make_conninfo("", **parameters).encode())
        await _finish_login(pgconn, address, world, until)
        return PostgresConnection(pgconn, address.display)
    except BaseException as error:
        if pgconn is not None:
            pgconn.finish()
        if isinstance(error, PsycopgError):
            raise _login_error(address, str(error)) from None
        raise


async def _finish_login(
    pgconn: pq.abc.PGconn, address: PostgresAddress, world: World, until: float
) -> None:
    step = pq.PollingStatus.WRITING
    while step != pq.PollingStatus.OK:
        if step == pq.PollingStatus.FAILED or pgconn.status == pq.ConnStatus.BAD:
            raise _login_error(address, pgconn.get_error_message())
        wish = WRITE if step == pq.PollingStatus.WRITING else READ
        # Its descriptor may be another one after each step.
        if now() >= until or not await world.ready({pgconn.socket: wish}, until):
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

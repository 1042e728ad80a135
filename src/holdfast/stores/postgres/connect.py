"""Opening connections to PostgreSQL: where a URL points, and what a server must be."""

from __future__ import annotations

from holdfast.core.contract import Settings
from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.io.clock import now
from holdfast.stores.postgres.connection import (
    Address,
    PostgresConnection,
    PostgresRefused,
    dial,
    first_value,
)
from holdfast.stores.postgres.enter import enter
from holdfast.stores.postgres.schema import SAFE_PATH, Schema
from holdfast.stores.postgres.statement import Statement
from holdfast.url import Url

__all__ = ["LIBPQ_OPTIONS", "Dialler", "address_of"]

LIBPQ_OPTIONS = (
    "application_name",
    "channel_binding",
    "gssencmode",
    "host",
    "krbsrvname",
    "options",
    "passfile",
    "port",
    "require_auth",
    "service",
    "ssl_min_protocol_version",
    "sslcert",
    "sslcrl",
    "sslkey",
    "sslmode",
    "sslnegotiation",
    "sslrootcert",
)
"""What is handed on to libpq as it is."""
OLDEST_SERVER = 140_000
POOLER_ROUNDS = 3

# Sent as one script, so in one transaction: behind a pooler no setting may outlive it.
_GREETING = b"""SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
SELECT set_config('datestyle', 'ISO', true), set_config('timezone', 'UTC', true);
SELECT pg_backend_pid(), current_setting('server_version_num')::integer,
  pg_is_in_recovery(), current_setting('server_encoding'),
  (SELECT backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid())"""
_PID = b"SELECT pg_catalog.pg_backend_pid()"
_PATH = f"SET search_path = {SAFE_PATH}; ".encode()
# Our functions read what others have just committed, whatever the role's default is. All they ask
# for are rows by their keys: to plan that anew, five times each, would keep others from the row.
_OURS = (
    _PATH + b"SET default_transaction_isolation = 'read committed'; "
    b"SET plan_cache_mode = force_generic_plan"
)


class Dialler:
    """Opens connections to one server, each checked before it is used."""

    def __init__(self, url: Url, settings: Settings, mode: str) -> None:
        self.address = address_of(url, settings)
        self.settings, self.mode = settings, mode
        self.schema = Schema(url.options.get("schema", "holdfast"), url.options.get("prefix", ""))

    def greet(self, address: Address, until: float) -> PostgresConnection:
        """A connection to a server that can be written to."""
        return dial(address, until, lambda made: _greet(made, until))

    def listen(self, address: Address, channel: str, until: float) -> PostgresConnection:
        """A connection that listens, or one that goes through a pooler, which can't. Many may open
        theirs in the moment when they all begin to wait: it asks for nothing else. A replica has
        nothing to listen to, and refuses."""
        return dial(address, until, lambda made: _listen(made, channel, until))

    def enter(
        self, statements: tuple[Statement, ...], by: float | None = None
    ) -> PostgresConnection:
        """A connection that found our tables, with the hot statements prepared."""
        until = now() + self.settings.request_seconds
        if by is not None and by < until:
            until = by  # the renewer's: a server that hangs must not keep it
        connection = self.greet(self.address, until)
        try:
            enter(self.schema, connection, self.settings.namespace, self.mode, until)
            if not connection.pooled:
                _prepare(connection, statements, until)
        except BaseException:
            connection.close()
            raise
        return connection

    def enter_session(self, statements: tuple[Statement, ...], until: float) -> PostgresConnection:
        """A connection whose session is ours alone, and stays alive while it waits."""
        connection = self.enter(statements, until)
        try:
            if connection.pooled:
                self._refuse_pooler(connection, until)
            connection.script(
                _PATH + b"SET statement_timeout = 0; SET lock_timeout = 0; "
                b"SET idle_in_transaction_session_timeout = 0; SET idle_session_timeout = 0",
                until,
            )
            _watch_clients(connection, until)
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse_pooler(self, ours: PostgresConnection, until: float) -> None:
        """A pooler that gives a session to several clients strands locks: two clients that live
        at the same time, and one that asks twice, tell such a one from a pooler of sessions."""
        seen = {str(ours.pid).encode(), _pid(ours, until), _pid(ours, until)}
        other = self.greet(self.address, until)
        try:
            theirs = {str(other.pid).encode()}
            for _ in range(POOLER_ROUNDS):
                if len(seen) > 1 or seen & theirs:
                    raise Unsupported(
                        f"{self.address.display} is a pooler that shares sessions between clients "
                        "(PgBouncer in transaction mode): advisory locks would be stranded in it. "
                        "Connect to the server itself, or use lease rows (without mode=advisory)"
                    )
                theirs.add(first_value(other.script(b"BEGIN; " + _PID, until)))
                seen |= {_pid(ours, until), _pid(ours, until)}
                other.script(b"ROLLBACK", until)
        finally:
            other.close()


def _greet(connection: PostgresConnection, until: float) -> None:
    answer = connection.script(_GREETING, until)
    pid, version, standby, encoding, started = (
        (answer.get_value(0, column) or b"").decode() for column in range(5)
    )
    connection.pooled = int(pid) != connection.pid
    connection.pid, connection.started = int(pid), started
    _check_server(connection.server, int(version), standby == "t", encoding)


def _listen(connection: PostgresConnection, channel: str, until: float) -> None:
    connection.pooled = _pid(connection, until) != b"%d" % connection.pid
    if not connection.pooled:
        connection.script(f'LISTEN "{channel}"'.encode(), until)


def _pid(connection: PostgresConnection, until: float) -> bytes:
    return first_value(connection.script(_PID, until))


def _watch_clients(connection: PostgresConnection, until: float) -> None:
    """Lets the server notice within a second that a waiting client is gone, where it can."""
    try:
        connection.script(b"SET client_connection_check_interval = '1s'", until)
    except PostgresRefused:
        if not connection.open:
            raise


def _check_server(display: str, version: int, standby: bool, encoding: str) -> None:
    if version < OLDEST_SERVER:
        raise Unsupported(f"{display} is PostgreSQL {version // 10000}; 14 is the oldest supported")
    if standby:
        raise BackendUnavailable(f"{display} is a read-only replica: locks need the primary")
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise Unsupported(f"{display} has the encoding {encoding}; names are any text: use UTF8")


def _prepare(
    connection: PostgresConnection, statements: tuple[Statement, ...], until: float
) -> None:
    calls = [statement for statement in statements if statement.sql.startswith(b"CALL ")]
    others = [statement for statement in statements if statement not in calls]
    script = [_OURS, *(b"PREPARE %s AS %s" % statement for statement in others)]
    connection.script(b"; ".join(script), until)
    for statement in calls:  # which SQL's own PREPARE does not take
        connection.prepare(statement, until)
    connection.known = frozenset(statement.name for statement in statements)


def address_of(url: Url, settings: Settings) -> Address:
    """Where a URL points, in libpq's words."""
    parameters = {
        "application_name": "holdfast",
        "client_encoding": "UTF8",
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
        "tcp_user_timeout": str(max(1, int(settings.request_seconds * 1000))),
    }
    if url.username is not None:
        parameters["user"] = url.username
    if url.password is not None:
        parameters["password"] = url.password
    if url.path.strip("/"):
        parameters["dbname"] = url.path.strip("/")
    parameters |= {key: value for key, value in url.options.items() if key in LIBPQ_OPTIONS}
    hosts = url.hosts
    if "host" in parameters:
        port = parameters.pop("port", None)
        hosts = ((parameters.pop("host"), int(port) if port else None),)
    return Address(hosts, parameters, str(url))

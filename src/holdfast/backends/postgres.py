"""``postgresql://``: lease rows by default, advisory locks with ``?mode=advisory``."""

from __future__ import annotations

from holdfast.backends.postgres_lease import LeaseBackend, LeaseStatements
from holdfast.backends.postgres_schema import Schema, schema_sql
from holdfast.core.contract import Guarantee, Runtime, Settings, Store
from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.runtimes.clock import now
from holdfast.url import Url, parse_url
from holdfast.wires.postgres import Address, Connection, Statement, dial
from holdfast.wires.postgres_async import AsyncWire
from holdfast.wires.postgres_blocking import BlockingWire

__all__ = ["LeaseStore", "open_store", "schema_sql"]

_LIBPQ = (
    "application_name", "channel_binding", "gssencmode", "host", "krbsrvname", "options",
    "passfile", "port", "require_auth", "service", "sslcert", "sslcrl", "sslkey", "sslmode",
    "sslnegotiation", "sslrootcert", "ssl_min_protocol_version",
)  # fmt: skip
_OURS = ("listen_url", "mode", "prefix", "schema")
OLDEST_SERVER = 140_000

_GREETING = Statement(
    b"",
    b"""SELECT pg_backend_pid(), current_setting('server_version_num')::integer,
  pg_is_in_recovery(), current_setting('server_encoding'),
  (SELECT backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid())""",
)


def open_store(url: Url, settings: Settings) -> Store:
    """``postgresql://user:password@host:5432/database``, and the options above."""
    url.refuse_unknown(*_LIBPQ, *_OURS)
    mode = url.options.get("mode", "lease")
    if mode == "lease":
        return LeaseStore(url, settings)
    raise ValueError(f"mode={mode!r}: postgresql:// has the modes lease and advisory")


class Dialler:
    """Opens connections to one server, each checked before it is used."""

    def __init__(self, url: Url, settings: Settings) -> None:
        self.address = address_of(url, settings)
        self.settings = settings
        self.schema = Schema(url.options.get("schema", "holdfast"), url.options.get("prefix", ""))

    def greet(self, address: Address, until: float) -> Connection:
        """A connection to a server that can be written to."""
        connection = dial(address, until)
        connection.deadline = until
        try:
            answer = connection.request(_GREETING, (), until)
            pid, version, standby, encoding, started = (
                (answer.get_value(0, column) or b"").decode() for column in range(5)
            )
            connection.pooled = int(pid) != connection.pid
            connection.pid, connection.started = int(pid), started
            _check_server(address.display, int(version), standby == "t", encoding)
        except BaseException:
            connection.close()
            raise
        return connection

    def enter(self, mode: str, statements: tuple[Statement, ...]) -> Connection:
        """A connection that found our tables, with the hot statements prepared."""
        until = now() + self.settings.request_seconds
        connection = self.greet(self.address, until)
        try:
            self.schema.enter(connection, self.settings.namespace, mode, until)
            if not connection.pooled:
                _prepare(connection, statements, until)
        except BaseException:
            connection.close()
            raise
        return connection


def _check_server(display: str, version: int, standby: bool, encoding: str) -> None:
    if version < OLDEST_SERVER:
        raise Unsupported(f"{display} is PostgreSQL {version // 10000}; 14 is the oldest supported")
    if standby:
        raise BackendUnavailable(f"{display} is a read-only replica: locks need the primary")
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise Unsupported(f"{display} has the encoding {encoding}; names are any text: use UTF8")


def _prepare(connection: Connection, statements: tuple[Statement, ...], until: float) -> None:
    script = b"; ".join(b"PREPARE %s AS %s" % statement for statement in statements)
    connection.script(script, until)
    connection.known = frozenset(statement.name for statement in statements)


class LeaseStore:
    """Lease rows: a hold ends by itself with its ttl."""

    guarantees = frozenset(Guarantee) - {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.WATCH}
    shortest_ttl = 0.05
    longest_ttl = 10 * 365 * 86400.0
    whole_seconds = False

    def __init__(self, url: Url, settings: Settings) -> None:
        self.display = str(url)
        self._settings = settings
        self._dialler = Dialler(url, settings)
        self._statements = LeaseStatements(self._dialler.schema)
        listen_url = url.options.get("listen_url")
        self._listen_address = (
            address_of(parse_url(listen_url), settings) if listen_url else self._dialler.address
        )

    def _dial(self) -> Connection:
        return self._dialler.enter("lease", self._statements.prepared)

    def _dial_listener(self) -> Connection:
        until = now() + self._settings.request_seconds
        return self._dialler.greet(self._listen_address, until)

    def backend(self, runtime: Runtime) -> LeaseBackend:
        settings = self._settings
        kind = BlockingWire if runtime.blocking else AsyncWire
        wire = kind(self._dial, settings.connections, settings.request_seconds, self.display)
        return LeaseBackend(
            runtime, wire, self._dial_listener, self._statements, settings, self.display
        )


def address_of(url: Url, settings: Settings) -> Address:
    """Where a URL points, in libpq's words."""
    wait = str(max(1, int(settings.request_seconds * 1000)))
    parameters = {
        "application_name": "holdfast",
        "client_encoding": "UTF8",
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
        "tcp_user_timeout": wait,
    }
    if url.username is not None:
        parameters["user"] = url.username
    if url.password is not None:
        parameters["password"] = url.password
    if url.path.strip("/"):
        parameters["dbname"] = url.path.strip("/")
    parameters |= {key: value for key, value in url.options.items() if key in _LIBPQ}
    hosts = url.hosts
    if "host" in parameters:
        port = parameters.pop("port", None)
        hosts = ((parameters.pop("host"), int(port) if port else None),)
    return Address(hosts, parameters, str(url))

"""Opening connections to PostgreSQL: address, server check, installation of our tables.

Every connection first checks that our tables exist in a version that it can share. Otherwise it
makes them, in one idempotent step that is guarded by an advisory lock.
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.core.contract import Finding, Runtime, Settings
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.io.clock import now
from holdfast.io.connection import World
from holdfast.stores._sql.connection import Opening, stored_findings, world_of
from holdfast.stores.postgres.connection import (
    NO_RIGHTS,
    PostgresAddress,
    PostgresConnection,
    PostgresRefused,
    Prepare,
    dial,
    first_value,
)
from holdfast.stores.postgres.schema import (
    PROTOCOL,
    REVISION,
    SAFE_PATH,
    PostgresSchema,
    Statement,
)
from holdfast.url import Url, parse_url

__all__ = ["LIBPQ_OPTIONS", "OWN_OPTIONS", "PostgresConnector"]

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
"""Options that are passed to libpq as they are."""
OWN_OPTIONS = ("listen_url", "mode", "prefix", "schema")
OLDEST_SERVER = 140_000
POOLER_ROUNDS = 3
CREATION_KEY = 7_019_267_233_085_447_000
"""Advisory lock of the installation: of two clients that install, one waits for the other."""
_MISSING = frozenset({"42883", "42P01", "3F000"})
"""Error codes for a function, a table or a schema that does not exist."""

# Sent as one script, so in one transaction: behind a pooler no setting may outlast it.
_GREETING = b"""SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
SELECT set_config('datestyle', 'ISO', true), set_config('timezone', 'UTC', true);
SELECT pg_backend_pid(), current_setting('server_version_num')::integer,
  pg_is_in_recovery(), current_setting('server_encoding'),
  (SELECT backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()),
  current_setting('default_transaction_isolation')"""
_PID = b"SELECT pg_catalog.pg_backend_pid()"
_PATH = f"SET search_path = {SAFE_PATH}; ".encode()
# Our functions must read what others have just committed, whatever the role's default is. They only
# read rows by key: planning each five times would keep the row locked for longer.
_OURS = (
    _PATH + b"SET default_transaction_isolation = 'read committed'; "
    b"SET plan_cache_mode = force_generic_plan"
)

PostgresOpening = Opening[PostgresConnection]

# What ``check()`` reads, also where our schema is missing.
_EXAMINE = """SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
SELECT json_build_object(
  'version', current_setting('server_version'),
  'fsync', current_setting('fsync'),
  'standbys', current_setting('synchronous_standby_names'),
  'replicas', (SELECT count(*) FROM pg_stat_replication),
  'tls', coalesce((SELECT s.ssl FROM pg_stat_ssl s WHERE s.pid = pg_backend_pid()), false),
  'local', inet_server_addr() IS NULL OR inet_server_addr() <<= '127.0.0.0/8'
           OR inet_server_addr() = '::1',
  'role', current_user,
  'oldest', (SELECT extract(epoch FROM clock_timestamp() - min(o.since)) FROM (
    SELECT a.xact_start AS since FROM pg_stat_activity a WHERE a.backend_xmin IS NOT NULL
      AND a.datname = current_database() AND a.pid <> pg_backend_pid()
    UNION ALL SELECT x.prepared FROM pg_prepared_xacts x WHERE x.database = current_database()) o),
  'slots', (SELECT count(*) FROM pg_replication_slots s WHERE age(s.xmin) > 1000000),
  'sees_all', pg_has_role('pg_read_all_stats', 'USAGE'),
  'tables', to_regclass('@protocol') IS NOT NULL,
  'creates', coalesce((SELECT has_schema_privilege(n.oid, 'CREATE') FROM pg_namespace n
    WHERE n.nspname = '%schema%'), has_database_privilege(current_database(), 'CREATE')),
  'open', (SELECT has_schema_privilege('public', n.oid, 'CREATE') FROM pg_namespace n
    WHERE n.nspname = '%schema%'))"""
_IS_USED = "SELECT EXISTS (SELECT FROM @protocol p WHERE p.namespace OPERATOR(pg_catalog.=) $1)"


class PostgresConnector:
    """Opens connections to one server and checks each before its first use."""

    def __init__(self, url: Url, settings: Settings, mode: str) -> None:
        self._address = _address_of(url, settings)
        self._settings, self._mode = settings, mode
        self.schema = PostgresSchema(
            url.options.get("schema", "holdfast"), url.options.get("prefix", "")
        )
        self._listen_address = self._address
        if "listen_url" in url.options:
            listen = parse_url(url.options["listen_url"])
            if listen.scheme != url.scheme:
                raise ValueError(f"listen_url is {listen.scheme}://, not {url.scheme}://")
            listen.refuse_unknown(*LIBPQ_OPTIONS)
            self._listen_address = _address_of(listen, settings)

    @property
    def has_listen_url(self) -> bool:
        """True if wake-ups come over an address of their own."""
        return self._listen_address is not self._address

    async def listen(self, channel: str, world: World, until: float) -> PostgresConnection:
        """Returns a connection that listens, or one through a pooler, which can't listen. Many
        clients may open theirs at the same moment, so it runs no other statement. A replica
        refuses LISTEN."""
        until = min(until, now() + self._settings.request_seconds)
        return await dial(self._listen_address, world, until, lambda made: _listen(made, channel))

    async def open(
        self, statements: tuple[Statement, ...], world: World, until: float
    ) -> PostgresConnection:
        """Returns a connection that has checked our tables, with these statements prepared."""
        opening = await self._greet(world, until)
        try:
            await _enter(self.schema, opening, self._settings.namespace, self._mode)
            if not opening.connection.pooled:
                await _prepare(opening, statements)
        except BaseException:
            opening.connection.close()
            raise
        return opening.connection

    async def open_session(
        self, statements: tuple[Statement, ...], world: World, until: float
    ) -> PostgresConnection:
        """Returns a connection whose session is ours alone and has no timeouts."""
        connection = await self.open(statements, world, until)
        opening = Opening(world, connection, until)
        try:
            if connection.pooled:
                await self._refuse_pooler(opening)
            await opening.ask(
                _PATH + b"SET statement_timeout = 0; SET lock_timeout = 0; "
                b"SET idle_in_transaction_session_timeout = 0; SET idle_session_timeout = 0"
            )
            await _watch_clients(opening)
        except BaseException:
            connection.close()
            raise
        return connection

    async def examine(self, runtime: Runtime) -> tuple[dict[str, Any], list[Finding]]:
        """Returns the server's settings, and what is stored for the namespace. Writes nothing."""
        until = now() + self._settings.request_seconds
        opening = await self._greet(world_of(runtime), until)
        try:
            answer = await opening.ask(self.schema.filled(_EXAMINE).encode())
            seen: dict[str, Any] = json.loads(first_value(answer))
            return seen, await self._stored(opening, seen)
        finally:
            opening.connection.close()

    async def _stored(self, opening: PostgresOpening, seen: dict[str, Any]) -> list[Finding]:
        namespace, mode = self._settings.namespace, self._mode
        server = opening.connection.server
        if not seen["tables"] and not seen["creates"]:
            raise missing_tables(self.schema, server)
        used = seen["tables"] and await self._is_used(opening)
        if used:  # then the check of a new connection only reads
            revision, version, kept = await _ask(self.schema, opening, namespace, mode)
            _compare(self.schema, server, namespace, mode, version, kept)
            if revision < REVISION and not seen["creates"]:
                raise missing_tables(self.schema, server)
        return stored_findings(namespace, mode, tables=seen["tables"], used=used)

    async def _is_used(self, opening: PostgresOpening) -> bool:
        request = self.schema.statement("is_used", _IS_USED), [self._settings.namespace.encode()]
        try:
            return first_value(await opening.ask(request)) == b"t"
        except PostgresRefused as error:
            raise _rights_error(self.schema, error) from None

    async def _greet(self, world: World, until: float) -> PostgresOpening:
        """Returns a connection to a server that can be written to."""
        return Opening(world, await dial(self._address, world, until, _greet), until)

    async def _refuse_pooler(self, ours: PostgresOpening) -> None:
        """Raises if the pooler shares a session between clients: locks would stay behind in it.
        Two clients at the same time see the same session then, or one client sees two."""
        seen = {str(ours.connection.pid).encode(), await _pid(ours), await _pid(ours)}
        other = await self._greet(ours.world, ours.until)
        try:
            theirs = {str(other.connection.pid).encode()}
            for _ in range(POOLER_ROUNDS):
                if len(seen) > 1 or seen & theirs:
                    raise Unsupported(
                        f"{self._address.display} is a pooler that shares sessions between clients "
                        "(PgBouncer in transaction mode): advisory locks would be stranded in it. "
                        "Connect to the server itself, or use lease rows (without mode=advisory)"
                    )
                theirs.add(first_value(await other.ask(b"BEGIN; " + _PID)))
                seen |= {await _pid(ours), await _pid(ours)}
                await other.ask(b"ROLLBACK")
        finally:
            other.connection.close()


async def _greet(opening: PostgresOpening) -> None:
    answer, connection = await opening.ask(_GREETING), opening.connection
    pid, version, standby, encoding, started, isolation = (
        (answer.get_value(0, column) or b"").decode() for column in range(6)
    )
    connection.pooled = int(pid) != connection.pid
    connection.isolated = connection.pooled and isolation != "read committed"
    connection.pid, connection.started = int(pid), started
    _check_server(connection.server, int(version), standby == "t", encoding)


async def _listen(opening: PostgresOpening, channel: str) -> None:
    connection = opening.connection
    connection.pooled = await _pid(opening) != b"%d" % connection.pid
    if not connection.pooled:
        await opening.ask(f'LISTEN "{channel}"'.encode())


async def _pid(opening: PostgresOpening) -> bytes:
    return first_value(await opening.ask(_PID))


async def _watch_clients(opening: PostgresOpening) -> None:
    """Makes the server notice within a second that a waiting client is gone, if it can."""
    try:
        await opening.ask(b"SET client_connection_check_interval = '1s'")
    except PostgresRefused:
        if not opening.connection.open:
            raise


def _check_server(display: str, version: int, standby: bool, encoding: str) -> None:
    if version < OLDEST_SERVER:
        raise Unsupported(f"{display} is PostgreSQL {version // 10000}; 14 is the oldest supported")
    if standby:
        raise BackendUnavailable(f"{display} is a read-only replica: locks need the primary")
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise Unsupported(f"{display} has the encoding {encoding}; names are any text: use UTF8")


async def _prepare(opening: PostgresOpening, statements: tuple[Statement, ...]) -> None:
    calls = [statement for statement in statements if statement.sql.startswith(b"CALL ")]
    others = [statement for statement in statements if statement not in calls]
    script = [_OURS, *(b"PREPARE %s AS %s" % statement for statement in others)]
    await opening.ask(b"; ".join(script))
    for statement in calls:  # the SQL statement PREPARE does not take CALL
        await opening.ask(Prepare(statement))
    opening.connection.known = frozenset(statement.name for statement in statements)


def _address_of(url: Url, settings: Settings) -> PostgresAddress:
    """Returns the address of a URL, with libpq's parameters."""
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
    return PostgresAddress(hosts, parameters, str(url))


async def _enter(
    schema: PostgresSchema, opening: PostgresOpening, namespace: str, mode: str
) -> None:
    """Checks that our tables exist and that this mode and version may share them; makes them if
    they are missing. Raises ``Incompatible`` or ``Unsupported`` otherwise."""
    try:
        revision, version, stored_mode = await _ask(schema, opening, namespace, mode)
    except PostgresRefused as error:
        if error.sqlstate not in _MISSING:
            raise
        await _create(schema, opening)
        revision, version, stored_mode = await _ask(schema, opening, namespace, mode)
    _compare(schema, opening.connection.server, namespace, mode, version, stored_mode)
    if revision < REVISION:
        await _create(schema, opening)


async def _ask(
    schema: PostgresSchema, opening: PostgresOpening, namespace: str, mode: str
) -> tuple[int, int, str]:
    """Returns the revision of our functions, and the protocol and mode of the namespace. A
    namespace that is new is bound to this mode."""
    check = schema.statement("enter", "SELECT @enter($1, $2, $3)")
    parameters = [namespace.encode(), mode.encode(), str(PROTOCOL).encode()]
    try:
        answer = first_value(await opening.ask((check, parameters)))
    except PostgresRefused as error:
        raise _rights_error(schema, error) from None
    return _read_entry(answer, opening.connection.server, namespace)


def _rights_error(schema: PostgresSchema, error: PostgresRefused) -> Exception:
    if error.sqlstate != NO_RIGHTS:
        return error
    return Unsupported(
        f"{error}. This role needs USAGE on the schema {schema.schema!r}, and SELECT, "
        "INSERT, UPDATE and DELETE on all tables in it"
    )


def _read_entry(answer: bytes, server: str, namespace: str) -> tuple[int, int, str]:
    try:
        revision, version, stored_mode = answer.decode().split(" ")
        return int(revision), int(version), stored_mode
    except ValueError:
        raise Incompatible(
            f"what is stored about the namespace {namespace!r} on {server} can't be read"
        ) from None


def _compare(
    schema: PostgresSchema, server: str, namespace: str, mode: str, version: int, stored_mode: str
) -> None:
    if version != PROTOCOL:
        raise Incompatible(
            f"the namespace {namespace!r} on {server} is used with protocol {version}, "
            f"which this version (protocol {PROTOCOL}) can't share locks with"
        )
    if stored_mode != mode:
        raise Incompatible(
            f"the namespace {namespace!r} on {server} is used in {stored_mode} mode, whose locks "
            f"do not exclude those of {mode} mode. Use another namespace; or, if no client uses it "
            f"any more, delete its row in {schema.filled('@protocol')}"
        )


async def _create(schema: PostgresSchema, opening: PostgresOpening) -> None:
    script = (
        f"BEGIN; SELECT pg_catalog.pg_advisory_xact_lock({CREATION_KEY}); {schema.sql()} COMMIT;"
    )
    try:
        await opening.ask(script.encode())
    except PostgresRefused as error:
        await opening.ask(b"ROLLBACK")
        if error.sqlstate == NO_RIGHTS:
            raise missing_tables(schema, opening.connection.server) from None
        raise


def missing_tables(schema: PostgresSchema, server: str) -> Unsupported:
    """Returns the error for a role that may not create our tables and functions."""
    words = "" if schema.schema == "holdfast" else f" --schema {schema.schema}"
    words += f" --prefix {schema.prefix}" if schema.prefix else ""
    return Unsupported(
        f"{server}: Holdfast's tables are missing, or older than this version, and this role may "
        "not create them: a role with the right CREATE on the database must run "
        f"`holdfast schema postgresql{words} | psql …` once"
    )

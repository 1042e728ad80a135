"""Opening connections to MySQL: address, login, checks of the server, settings of the session.

PyMySQL does the handshake, on a socket of ours and with one deadline for the whole login. That
blocks: for an event loop it runs on a thread. Stores and fenced resources both log in this way. No
other module uses private parts of PyMySQL: pyproject.toml has an upper limit for its version, and
``tests/shape/test_private_parts.py`` names the parts.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import pymysql
from pymysql.constants import CLIENT

from holdfast.core.contract import Finding, Runtime, Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, HoldfastError, Incompatible, Unsupported
from holdfast.io import blocking
from holdfast.io.clock import now, wall
from holdfast.io.connection import World, open_socket, open_unix
from holdfast.stores._sql.connection import HostFailures, Opening, stored_findings, world_of
from holdfast.stores.mysql.connection import NO_RIGHTS, MySqlConnection, MySqlPool, MySqlRefused
from holdfast.stores.mysql.protocol import MySqlReply, Result, quoted
from holdfast.stores.mysql.row import MICROS
from holdfast.stores.mysql.sql import PROTOCOL, TABLES, UTC_MICROS, MySqlSchema
from holdfast.url import Url

__all__ = [
    "MOST_SKEW_SECONDS",
    "OPTIONS",
    "SKEW_MICROS",
    "Ask",
    "MySqlAddress",
    "MySqlDialler",
    "MySqlStore",
    "address_of",
    "ahead_seconds",
    "dial",
    "log_in",
]

T = TypeVar("T")
Ask = Callable[[bytes], Awaitable[MySqlReply]]
"""Sends one request and returns its reply."""
MySqlOpening = Opening[MySqlConnection]

OPTIONS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_mode", "unix_socket")
"""URL options that describe the connection."""
SSL_MODES = ("disabled", "required", "verify_ca", "verify_identity")
OLDEST_PYMYSQL = (1, 2)
"""Older versions log in without TLS if the server claims not to support it, even if TLS was
required."""
MOST_LOGIN_BYTES = 1 << 20
"""Limit for all packets of a login: a server may announce packets of any size."""
CLEAR_TEXT = ("mysql_clear_password", "dialog", "mysql_old_password")
"""Authentication plug-ins that reveal the password to anyone who can read the connection."""

OLDEST_SERVER = {"MySQL": (8, 0), "MariaDB": (10, 5)}
DEFAULT_PREFIX = "holdfast_"
NO_TABLE = 1146
_FINAL = frozenset({1044, 1045, 1049, 1130, 1251, 1524, 1698, 1820, 1862, 3118, 3955, 4151})
"""Refusals of a login that another attempt can't change: the account, its password, its rights, its
host, the authentication plug-in, the database. Too many connections is not one of them."""

_SESSION = (
    b"SET SESSION time_zone='+00:00', autocommit=1, completion_type=0, "
    b"sql_mode='STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout=%d, "
    b"@holdfast_now=0, @holdfast_skew=%d; "
    b"SET SESSION TRANSACTION ISOLATION LEVEL %s"
)
MOST_SKEW_SECONDS = 0.5
"""Most allowed difference between the clock of a Galera node and the client's clock."""
SKEW_MICROS = int(2 * MOST_SKEW_SECONDS * MICROS)
"""Most difference between the clocks of two such nodes. An expired hold is granted to another
claim only after this time."""
IDLE_SECONDS = 2147483
"""The largest ``wait_timeout`` that servers on all systems accept."""
# Session variables: Percona's Galera has no global wsrep_on.
_FACTS = (
    b"SHOW SESSION VARIABLES WHERE Variable_name IN ('version', 'read_only', 'innodb_read_only', "
    b"'wsrep_on', 'log_bin', 'binlog_format')"
)


class MySqlAddress(NamedTuple):
    """The server's hosts and how to log in. ``parameters`` are PyMySQL's and may be secret."""

    hosts: tuple[tuple[str, int | None], ...]
    parameters: dict[str, Any]
    display: str

    def __repr__(self) -> str:
        return f"MySqlAddress({self.display!r})"


def address_of(url: Url) -> MySqlAddress:
    """Returns the address of a URL. Raises ``ValueError`` for a URL that is not complete."""
    database = url.path.strip("/")
    if not database:
        raise ValueError("mysql:// needs a database: mysql://user:password@host:3306/database")
    parameters: dict[str, Any] = {"database": database, "charset": "utf8mb4"}
    if url.username is not None:
        parameters["user"] = url.username
    if url.password is not None:
        parameters["password"] = url.password.encode()  # PyMySQL would encode it as Latin-1
    hosts = url.hosts
    if "unix_socket" in url.options:
        parameters["unix_socket"] = url.options["unix_socket"]
        hosts = ()
    elif not hosts:
        raise ValueError("mysql:// needs a host, or the option unix_socket")
    return MySqlAddress(hosts, parameters | _tls(url), str(url))


def _tls(url: Url) -> dict[str, Any]:
    """Returns the TLS parameters. TLS verifies the certificate and the host name unless
    ``ssl_mode`` says otherwise."""
    given = {key for key in ("ssl_ca", "ssl_cert", "ssl_key") if key in url.options}
    mode = url.options.get("ssl_mode", "verify_identity" if given else "disabled").lower()
    if mode not in SSL_MODES:
        raise ValueError(f"ssl_mode={mode!r}: one of {', '.join(SSL_MODES)}")
    if mode == "disabled":
        return {"ssl_disabled": True}
    context = _tls_context(url)
    context.check_hostname = mode == "verify_identity"
    if mode == "required":
        context.verify_mode = ssl.CERT_NONE
    return {"ssl": context}


def _tls_context(url: Url) -> ssl.SSLContext:
    """The settings of TLS with the files of a URL; ``ValueError`` if one can't be used."""
    ca, cert, key = (url.options.get(word) for word in ("ssl_ca", "ssl_cert", "ssl_key"))
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        paths = ", ".join(path for path in (ca, cert, key) if path)
        raise ValueError(f"the files for TLS can't be used ({paths}): {error}") from error
    return context


def log_in(address: MySqlAddress, until: float, **options: Any) -> Any:
    """Returns a PyMySQL connection, logged in to the first host that accepts the login.

    Raises ``BackendUnavailable`` if no host does, and ``Unsupported`` for a login that would be
    less safe than the address requires.
    """

    async def use(client: _LoginClient) -> _LoginClient:
        return client

    return run_now(_at_first_host(address, blocking.WORLD, until, options, use))


async def _at_first_host(
    address: MySqlAddress,
    world: World,
    until: float,
    options: dict[str, Any],
    use: Callable[[_LoginClient], Awaitable[T]],
) -> T:
    """Logs in to one host after the other, and returns the result of ``use`` for the first for
    which it does not raise ``BackendUnavailable``."""
    if pymysql.VERSION[:2] < OLDEST_PYMYSQL:
        raise Unsupported(
            f"PyMySQL {pymysql.VERSION_STRING} may log in without TLS although TLS is required: "
            "pip install -U 'holdfast[mysql]'"
        )
    failures = HostFailures(address.display)
    for host, port in address.hosts or (("", None),):
        try:
            client = await _log_in_at(address, host, port or 3306, world, until, options)
            return await use(client)
        except BackendUnavailable as failure:
            failures.add((host, port), failure)
    raise failures.error()


async def _log_in_at(
    address: MySqlAddress,
    host: str,
    port: int,
    world: World,
    until: float,
    options: dict[str, Any],
) -> _LoginClient:
    given: dict[str, Any] = {"host": host, "port": port} if host else {}
    try:
        client = _LoginClient(
            **given, **address.parameters, **options, local_infile=False, defer_connect=True
        )
        if host:
            sock = await open_socket(world, host, port, until)
        else:
            sock = await open_unix(world, address.parameters["unix_socket"], until)
        await world.run(lambda: client.log_in(sock, until), lambda _: client.close_now())
    except Exception as error:
        if isinstance(error, HoldfastError):
            raise
        raise _login_error(address, error) from error
    if "ssl" in address.parameters and not client.has_tls:
        client.close_now()
        raise Unsupported(f"{address.display} requires TLS, and PyMySQL logged in without it")
    return client


def _login_error(address: MySqlAddress, error: Exception) -> BackendUnavailable:
    """Returns the error to raise for one of a login."""
    where = address.display
    if isinstance(error, pymysql.MySQLError) and not isinstance(error, pymysql.InternalError):
        final = error.args[:1] != () and error.args[0] in _FINAL
        what = "refused" if final else "can't be reached"
        return BackendUnavailable(f"{where} {what}: {_text(error)}", final=final)
    if isinstance(error, OSError):
        cause = error.strerror or str(error) or "the login was not answered in time"
        return BackendUnavailable(f"{where} can't be reached: {cause}")
    if isinstance(error, RuntimeError):  # PyMySQL lacks a package that the login needs
        return BackendUnavailable(f"{where} can't be used: {error}", final=True)
    return _not_mysql(address, error)  # any error that PyMySQL raises for malformed packets


def _not_mysql(address: MySqlAddress, error: Exception) -> BackendUnavailable:
    cause = f"{type(error).__name__}: {error}"
    text = f"{address.display} refused: no MySQL server is at this address: {cause}"
    return BackendUnavailable(text, final=True)


_Client: Any = pymysql.Connection  # its type stubs lack the private parts that are used here


class _LoginClient(_Client):  # type: ignore[misc]
    """A PyMySQL client whose login has one deadline, and which sends no password in clear text
    over a connection without TLS."""

    _until: float | None = None
    """Deadline of the login; None after the login."""
    _left = MOST_LOGIN_BYTES
    _sock: Any
    _rfile: Any
    _current_timeout: float | None
    _read_timeout: float | None
    _write_timeout: float | None

    def __init__(self, **parameters: Any) -> None:
        self._local = "unix_socket" in parameters
        plain = not self._local and parameters.get("ssl_disabled", False)
        refused = dict.fromkeys(CLEAR_TEXT, _RefusedPlugin) if plain else None
        super().__init__(**parameters, auth_plugin_map=refused)

    def log_in(self, sock: socket.socket, until: float) -> None:
        """Logs in on a connected socket, before the deadline. Blocks; closes the socket if it
        fails."""
        try:
            self._until = until
            self._set_timeouts()
            sock.settimeout(self._read_timeout)
            self._secure = self._local  # other users can't read a UNIX socket's data
            self.connect(sock)
        except BaseException:
            sock.close()
            raise
        self._until = None
        self._current_timeout = self._read_timeout = self._write_timeout = None
        self._sock.settimeout(None)

    @property
    def has_tls(self) -> bool:
        return isinstance(self._sock, ssl.SSLSocket)

    def close_now(self) -> None:
        """Closes the socket without a word to the server."""
        self._force_close()

    def take_socket(self) -> socket.socket:
        """Returns the socket, which the caller owns from now on."""
        sock: socket.socket = self._sock
        self._rfile.close()  # it would keep the socket open
        self._sock = self._rfile = None
        return sock

    def _time_left(self) -> float:
        left = (self._until or 0.0) - now()
        if left <= 0:
            raise TimeoutError("the login was not answered in time")
        return left

    def _set_timeouts(self) -> None:
        left = self._time_left()
        self._read_timeout, self._write_timeout, self.connect_timeout = left, left, left

    def _read_bytes(self, num_bytes: int) -> bytes:
        """Reads with the deadline of the whole login. PyMySQL's own method restarts its timeout
        with every piece of a packet."""
        if self._until is None:
            return bytes(super()._read_bytes(num_bytes))
        self._left -= num_bytes
        if self._left < 0:
            raise ValueError(f"more than {MOST_LOGIN_BYTES} bytes for a login")
        data = b""
        while len(data) < num_bytes:
            self._set_timeouts()
            self._sock.settimeout(self._read_timeout)
            piece = self._rfile.read1(num_bytes - len(data))
            if not piece:
                raise ConnectionResetError("the server ended the connection")
            data += piece
        return data


class _RefusedPlugin:
    """Replaces an authentication plug-in that would reveal the password."""

    def __init__(self, client: Any) -> None:
        self._host = client.host

    def authenticate(self, packet: object) -> object:
        raise Unsupported(
            f"the server at {self._host!r} requests the password in clear text, on a connection "
            "without TLS: add ssl_mode=verify_identity to the URL"
        )


def _text(error: Exception) -> str:
    return str(error.args[-1]) if error.args else type(error).__name__


async def dial(
    address: MySqlAddress,
    world: World,
    until: float,
    greet: Callable[[MySqlOpening], Awaitable[None]],
) -> MySqlConnection:
    """Returns a connection to the first host that answers and for which ``greet`` does not raise
    ``BackendUnavailable``."""

    async def use(client: _LoginClient) -> MySqlConnection:
        connection = MySqlConnection(client.take_socket(), client.thread_id(), address.display)
        try:
            await greet(Opening(world, connection, until))
        except BaseException:
            connection.close()
            raise
        return connection

    options = {"client_flag": CLIENT.MULTI_STATEMENTS, "autocommit": None}
    return await _at_first_host(address, world, until, options, use)


async def _execute(opening: MySqlOpening, sql: bytes) -> list[Result]:
    """Sends one request. Returns its results; raises for an error."""
    return opening.connection.checked(await opening.ask(sql))


class MySqlDialler:
    """Opens connections to one server, and checks each before it is used."""

    def __init__(self, url: Url, settings: Settings, mode: str) -> None:
        self.address = address_of(url)
        self.settings, self.mode = settings, mode
        self.schema = MySqlSchema(url.options.get("prefix", DEFAULT_PREFIX))
        self.galera = False
        """True if the server is a Galera node: sessions may be on different nodes, where they
        can't find or kill each other."""
        self._checked = False

    async def connect_long_lived(self, world: World, until: float) -> MySqlConnection:
        """Opens a connection that the server does not end for being idle."""
        return await self.connect(world, until, b"SET SESSION wait_timeout = %d" % IDLE_SECONDS)

    async def connect(self, world: World, until: float, more: bytes = b"") -> MySqlConnection:
        """Opens a connection to the first host that is writable, with our session settings."""
        return await dial(self.address, world, until, lambda made: self._greet(made, more))

    async def _greet(self, opening: MySqlOpening, more: bytes) -> None:
        results = await _execute(opening, _FACTS)
        facts = {(row[0] or b"").decode(): (row[1] or b"").decode() for row in results[0].rows}
        _check_server(self.address.display, facts)
        self.galera = facts.get("wsrep_on", "OFF") == "ON"
        self._refuse_galera()
        if self.galera:
            await self._check_clock(opening)
        await _execute(opening, self._settings(facts) + (b"; " + more if more else b""))

    def _refuse_galera(self) -> None:
        if self.galera and self.mode == "advisory":
            raise Unsupported(
                f"{self.address.display} is a Galera cluster, where GET_LOCK locks one node only: "
                "use lease rows (remove mode=advisory)"
            )

    async def _check_clock(self, opening: MySqlOpening) -> None:
        """Raises if the clocks differ too much: every node ends holds by its own clock."""
        before = wall()
        (found,) = await _execute(opening, b"SELECT " + UTC_MICROS.encode())
        clock = int(found.rows[0][0] or 0) / MICROS
        ahead = ahead_seconds(clock, before, wall())
        if abs(ahead) > MOST_SKEW_SECONDS:
            raise BackendUnavailable(
                f"{self.address.display} is a Galera node whose clock is {abs(ahead):.1f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} this host's: holds would end at another "
                f"time there than on other nodes. A difference of {MOST_SKEW_SECONDS:g} s is "
                "allowed: synchronise both clocks (NTP)"
            )

    def _settings(self, facts: dict[str, str]) -> bytes:
        # A statement-based binary log can't be written under READ COMMITTED.
        as_text = facts.get("log_bin") == "ON" and facts.get("binlog_format") == "STATEMENT"
        level = b"REPEATABLE READ" if as_text else b"READ COMMITTED"
        skew = SKEW_MICROS if self.galera else 0
        return _SESSION % (max(1, int(self.settings.request_seconds)), skew, level)

    async def connect_to_namespace(self, world: World, until: float) -> MySqlConnection:
        """Opens a connection for requests on the lock tables: creates missing tables, and checks
        the protocol version and mode of the namespace."""
        connection = await self.connect(world, until)
        try:
            await self._check_namespace(Opening(world, connection, until))
        except BaseException:
            connection.close()
            raise
        return connection

    async def _check_namespace(self, opening: MySqlOpening) -> None:
        try:
            kept = await self._protocol(opening)
        except MySqlRefused as error:
            if error.code != NO_TABLE:
                raise
            await self._create(opening)
            kept = None
        if kept is None:
            await self._insert_protocol(opening)
            kept = await self._protocol(opening)
        if not self._checked:
            if await self._check_engines(opening) < len(TABLES):
                await self._create(opening)
            self._checked = True
        self._compare(*(kept or (PROTOCOL, self.mode)))

    async def examine(
        self, runtime: Runtime, judge: Callable[[Ask], Awaitable[list[Finding]]]
    ) -> list[Finding]:
        """Returns the findings of ``judge``, which sends requests on a new connection, and what is
        stored for the namespace. Writes nothing."""
        world, until = world_of(runtime), now() + self.settings.request_seconds
        opening = Opening(world, await self.connect(world, until), until)
        try:
            return [*await judge(opening.ask), *await self._stored(opening)]
        finally:
            opening.connection.close()

    async def _stored(self, opening: MySqlOpening) -> list[Finding]:
        tables = await self._check_engines(opening) == len(TABLES)
        try:
            kept = await self._protocol(opening)
        except MySqlRefused as error:
            if error.code != NO_TABLE:
                raise
            kept = None
        if kept is not None:
            self._compare(*kept)
        namespace, used = self.settings.namespace, kept is not None
        return stored_findings(namespace, self.mode, tables=tables, used=used, needs="CREATE")

    async def _protocol(self, opening: MySqlOpening) -> tuple[int, str] | None:
        """Returns the stored version and mode of the namespace; None if it is new."""
        query = self.schema.filled("SELECT version, mode FROM @protocol WHERE namespace = ")
        sql = query.encode() + quoted(self.settings.namespace.encode())
        try:
            results = await _execute(opening, sql)
        except MySqlRefused as error:
            if error.code in NO_RIGHTS:
                raise Unsupported(f"{error}. {self._needed_rights()}") from None
            raise
        for version, mode in results[0].rows:
            return int(version or 0), (mode or b"").decode()
        return None

    async def _insert_protocol(self, opening: MySqlOpening) -> None:
        sql = self.schema.filled("INSERT IGNORE INTO @protocol VALUES (").encode()
        values = (quoted(self.settings.namespace.encode()), PROTOCOL, quoted(self.mode.encode()))
        sql += b"%s, %d, %s)" % values
        try:
            await _execute(opening, sql)
        except MySqlRefused as error:
            if error.code in NO_RIGHTS:
                raise Unsupported(f"{error}. {self._needed_rights()}") from None
            raise

    def _needed_rights(self) -> str:
        return (
            "This account needs SELECT, INSERT, UPDATE and DELETE on all tables whose names begin "
            f"with {self.schema.prefix!r}"
        )

    async def _create(self, opening: MySqlOpening) -> None:
        try:
            await _execute(opening, self.schema.sql().rstrip(" ;\n").encode())
        except MySqlRefused as error:
            if error.code not in NO_RIGHTS:
                raise
            prefix = self.schema.prefix
            option = "" if prefix == DEFAULT_PREFIX else f" --prefix {prefix}"
            raise Unsupported(
                f"{self.address.display}: Holdfast's tables are missing, or older than this "
                "version, and this account may not create them: an account with the right CREATE "
                f"must run `holdfast schema mysql{option} | mysql …` once"
            ) from None

    async def _check_engines(self, opening: MySqlOpening) -> int:
        """Returns how many of our tables exist; raises ``Unsupported`` for one without
        transactions."""
        names = b", ".join(quoted((self.schema.prefix + table).encode()) for table in TABLES)
        sql = (
            b"SELECT TABLE_NAME, ENGINE FROM information_schema.TABLES "
            b"WHERE TABLE_SCHEMA = DATABASE() AND CAST(TABLE_NAME AS BINARY) IN (%s)" % names
        )
        results = await _execute(opening, sql)
        for table, engine in results[0].rows:
            if (engine or b"").lower() != b"innodb":
                raise Unsupported(
                    f"the table {(table or b'').decode()} on {self.address.display} has the engine "
                    f"{(engine or b'?').decode()}, which has no transactions: InnoDB is needed"
                )
        return len(results[0].rows)

    def _compare(self, version: int, mode: str) -> None:
        namespace, server = self.settings.namespace, self.address.display
        if version != PROTOCOL:
            raise Incompatible(
                f"the namespace {namespace!r} on {server} is used with protocol {version}, "
                f"which can't share locks with this version's protocol {PROTOCOL}"
            )
        if mode != self.mode:
            raise Incompatible(
                f"the namespace {namespace!r} on {server} is used in {mode} mode, whose locks do "
                f"not exclude those of {self.mode} mode. Use another namespace, or, when no client "
                f"uses this one any more, delete its row in {self.schema.filled('@protocol')}"
            )


def ahead_seconds(clock: float, before: float, after: float) -> float:
    """Returns how far another clock is ahead, which was read between two readings of ours; 0 if it
    lies between them.

    >>> ahead_seconds(105.0, 100.0, 101.0), ahead_seconds(100.5, 100.0, 101.0)
    (4.0, 0.0)
    """
    return clock - min(max(clock, before), after)


def _check_server(display: str, facts: dict[str, str]) -> None:
    version = facts.get("version", "")
    kind = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_SERVER[kind]:
        oldest = ".".join(map(str, OLDEST_SERVER[kind]))
        raise Unsupported(f"{display} is {kind} {version}; {oldest} is the oldest supported")
    writable = ("OFF", "0", "")
    if facts.get("read_only", "") not in writable or facts.get("innodb_read_only") not in writable:
        raise BackendUnavailable(f"{display} is a read-only replica: locks need the primary")


class MySqlStore:
    """Base class of both MySQL stores: a dialler, and a connection pool for short requests."""

    mode: str
    shortest_ttl = 0.05
    whole_seconds = False

    def __init__(self, url: Url, settings: Settings) -> None:
        self.display = str(url)
        self._settings = settings
        self._dialler = MySqlDialler(url, settings, self.mode)

    def _pool(self, runtime: Runtime) -> MySqlPool:
        return MySqlPool(runtime, self._dialler.connect_to_namespace, self._settings, self.display)

"""Opening connections to MySQL: the login, what a server must be, and the settings of a session.

PyMySQL does the handshake, on a socket that is opened here. This is the only way in which
Holdfast connects, for a store and for a resource alike. It knows private parts of PyMySQL
(``_read_bytes``, ``_sock``, ``_secure``), so the versions of PyMySQL that are taken have an end.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, NamedTuple

import pymysql
from pymysql.constants import CLIENT

from holdfast.core.contract import Runtime, Settings
from holdfast.errors import BackendUnavailable, HoldfastError, Incompatible, Unsupported
from holdfast.io.clock import now, wall
from holdfast.stores._sql.wire import make_wire
from holdfast.stores.mysql.connection import Connection, Refused, Wire
from holdfast.stores.mysql.protocol import quoted
from holdfast.stores.mysql.row import MICROS
from holdfast.stores.mysql.sql import PROTOCOL, TABLES, UTC_MICROS, Schema
from holdfast.url import Url

__all__ = [
    "MOST_SKEW_SECONDS",
    "OPTIONS",
    "SKEW_MICROS",
    "Address",
    "Dialler",
    "Store",
    "address_of",
    "ahead_seconds",
    "dial",
    "log_in",
]

OPTIONS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_mode", "unix_socket")
"""How a connection is made."""
SSL_MODES = ("disabled", "required", "verify_ca", "verify_identity")
OLDEST_PYMYSQL = (1, 2)
"""Older ones log in without TLS where the server says that it has none, whatever was asked for."""
MOST_LOGIN_BYTES = 1 << 20
"""More than all packets of a login ever have; a server may announce any number."""
CLEAR_TEXT = ("mysql_clear_password", "dialog", "mysql_old_password")
"""Ways to prove a password that give it away to whoever reads the connection."""

OLDEST_SERVER = {"MySQL": (8, 0), "MariaDB": (10, 5)}
NO_TABLE = 1146
NO_RIGHTS = frozenset({1044, 1142, 1227, 1410})

_SESSION = (
    b"SET SESSION time_zone='+00:00', autocommit=1, completion_type=0, "
    b"sql_mode='STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout=%d, "
    b"@holdfast_now=0, @holdfast_skew=%d; "
    b"SET SESSION TRANSACTION ISOLATION LEVEL %s"
)
MOST_SKEW_SECONDS = 0.5
"""So far the clock of a Galera node may be from that of whoever asks it."""
SKEW_MICROS = int(2 * MOST_SKEW_SECONDS * MICROS)
"""So far two such nodes may be from each other: a hold that ran out is others' only after that."""
IDLE_SECONDS = 2147483
"""The most that servers on all systems take as ``wait_timeout``."""
# As the session has them: Percona's Galera has no global wsrep_on.
_FACTS = (
    b"SHOW SESSION VARIABLES WHERE Variable_name IN ('version', 'read_only', 'innodb_read_only', "
    b"'wsrep_on', 'log_bin', 'binlog_format')"
)


class Address(NamedTuple):
    """Where a server is and how to log in; ``parameters`` are PyMySQL's and may be secret."""

    hosts: tuple[tuple[str, int | None], ...]
    parameters: dict[str, Any]
    display: str

    def __repr__(self) -> str:
        return f"Address({self.display!r})"


def address_of(url: Url) -> Address:
    """Where a URL points, in PyMySQL's words."""
    database = url.path.strip("/")
    if not database:
        raise ValueError("mysql:// needs a database: mysql://user:password@host:3306/database")
    parameters: dict[str, Any] = {"database": database, "charset": "utf8mb4"}
    if url.username is not None:
        parameters["user"] = url.username
    if url.password is not None:
        parameters["password"] = url.password.encode()  # PyMySQL would take it for Latin-1
    hosts = url.hosts
    if "unix_socket" in url.options:
        parameters["unix_socket"] = url.options["unix_socket"]
        hosts = ()
    elif not hosts:
        raise ValueError("mysql:// needs a host, or the option unix_socket")
    return Address(hosts, parameters | _tls(url), str(url))


def _tls(url: Url) -> dict[str, Any]:
    """As the options say: verified wherever there is TLS and nothing else was asked for."""
    given = {key for key in ("ssl_ca", "ssl_cert", "ssl_key") if key in url.options}
    mode = url.options.get("ssl_mode", "verify_identity" if given else "disabled").lower()
    if mode not in SSL_MODES:
        raise ValueError(f"ssl_mode={mode!r}: one of {', '.join(SSL_MODES)}")
    if mode == "disabled":
        return {"ssl_disabled": True}
    context = ssl.create_default_context(cafile=url.options.get("ssl_ca"))
    context.check_hostname = mode == "verify_identity"
    if mode == "required":
        context.verify_mode = ssl.CERT_NONE
    if "ssl_cert" in url.options:
        context.load_cert_chain(url.options["ssl_cert"], url.options.get("ssl_key"))
    return {"ssl": context}


def log_in(address: Address, until: float, **options: Any) -> Any:
    """A connection of PyMySQL's to the first of the hosts that lets us in.

    Raises ``BackendUnavailable`` if none does, and ``Unsupported`` for a login that would not be
    as safe as the address asks.
    """
    if pymysql.VERSION[:2] < OLDEST_PYMYSQL:
        raise Unsupported(
            f"PyMySQL {pymysql.VERSION_STRING} may go on without TLS where TLS was asked for: "
            "pip install -U 'holdfast[mysql]'"
        )
    error: BackendUnavailable | None = None
    for host, port in address.hosts or (("", None),):
        try:
            return _log_in_at(address, host, port, until, options)
        except BackendUnavailable as failure:
            error = failure
    raise error or BackendUnavailable(f"{address.display}: no host")


def _log_in_at(
    address: Address, host: str, port: int | None, until: float, options: dict[str, Any]
) -> Any:
    if until <= now():
        raise BackendUnavailable(f"{address.display} did not answer the login in time")
    given: dict[str, Any] = {"host": host, "port": port or 3306} if host else {}
    try:
        client = _Login(
            **given, **address.parameters, **options, local_infile=False, defer_connect=True
        )
        client.log_in(until)
    except HoldfastError:
        raise
    except pymysql.MySQLError as error:
        raise BackendUnavailable(f"{address.display} can't be reached: {_text(error)}") from None
    except (OSError, RuntimeError) as error:
        raise BackendUnavailable(f"{address.display} can't be reached: {error}") from None
    except Exception as error:  # whatever PyMySQL makes of packets that are no login of MySQL's
        told = f"{type(error).__name__}: {error}"
        raise BackendUnavailable(f"{address.display} does not speak MySQL: {told}") from error
    if "ssl" in address.parameters and not isinstance(client._sock, ssl.SSLSocket):
        client._force_close()
        raise Unsupported(f"{address.display} asks for TLS, and PyMySQL logged in without it")
    return client


_Client: Any = pymysql.Connection  # typed without the parts that are used here


class _Login(_Client):  # type: ignore[misc]
    """A client whose login ends by a deadline, and tells no password to who reads along."""

    _until: float | None = None
    """By when the login must be done; nothing once it is."""
    _left = MOST_LOGIN_BYTES
    _current_timeout: float | None
    _read_timeout: float | None
    _write_timeout: float | None

    def __init__(self, **parameters: Any) -> None:
        self._local = "unix_socket" in parameters
        plain = not self._local and parameters.get("ssl_disabled", False)
        refused = dict.fromkeys(CLEAR_TEXT, _Refused) if plain else None
        super().__init__(**parameters, auth_plugin_map=refused)

    def log_in(self, until: float) -> None:
        """Connects and logs in by then."""
        self._until = until
        self._set_timeouts()
        wire = self._open_local() if self._local else self._open()
        self._secure = self._local  # nobody else reads such a socket
        self.connect(wire)
        self._until = None
        self._current_timeout = self._read_timeout = self._write_timeout = None
        self._sock.settimeout(None)

    def _open_local(self) -> socket.socket:
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            wire.settimeout(self._time_left())
            wire.connect(self.unix_socket)
        except BaseException:
            wire.close()
            raise
        return wire

    def _open(self) -> socket.socket:
        """Connects to the first of the host's addresses that answers; each has its share."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        failure = OSError(f"{self.host!r} has no address")
        for number, (family, kind, protocol, _, where) in enumerate(found):
            wire = socket.socket(family, kind, protocol)
            try:
                wire.settimeout(self._time_left() / (len(found) - number))
                wire.connect(where)
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                return wire
            except OSError as error:
                wire.close()
                failure = error
            except BaseException:
                wire.close()
                raise
        raise failure

    def _time_left(self) -> float:
        left = (self._until or 0.0) - now()
        if left <= 0:
            raise TimeoutError("the login was not answered in time")
        return left

    def _set_timeouts(self) -> None:
        left = self._time_left()
        self._read_timeout, self._write_timeout, self.connect_timeout = left, left, left

    def _read_bytes(self, num_bytes: int) -> bytes:
        """PyMySQL's own gives every piece of an answer the whole time anew."""
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


class _Refused:
    """Stands in for an authentication plug-in that would give the password away."""

    def __init__(self, client: Any) -> None:
        self._host = client.host

    def authenticate(self, packet: object) -> object:
        raise Unsupported(
            f"the server at {self._host!r} asks for the password in clear text, on a connection "
            "without TLS: give the URL ssl_mode=verify_identity"
        )


def _text(error: Exception) -> str:
    return str(error.args[-1]) if error.args else type(error).__name__


def dial(address: Address, until: float) -> Connection:
    """Connects to the first of the hosts that answers."""
    options = {"client_flag": CLIENT.MULTI_STATEMENTS, "autocommit": None}
    return Connection(log_in(address, until, **options), address.display)


class Dialler:
    """Opens connections to one server, each checked before it is used."""

    def __init__(self, url: Url, settings: Settings, mode: str) -> None:
        self.address = address_of(url)
        self.settings, self.mode = settings, mode
        self.schema = Schema(url.options.get("prefix", "holdfast_"))
        self.galera = False
        """Whether sessions can't find each other: they may be on different nodes."""
        self._checked = False

    def greet_to_stay(self, until: float) -> Connection:
        """One that the server does not end however long it is idle."""
        return self.greet(until, b"SET SESSION wait_timeout = %d" % IDLE_SECONDS)

    def greet(self, until: float, more: bytes = b"") -> Connection:
        """A connection to a server that can be written to, with our settings."""
        connection = dial(self.address, until)
        try:
            results = connection.checked(connection.request(_FACTS, until))
            facts = {(row[0] or b"").decode(): (row[1] or b"").decode() for row in results[0].rows}
            _check_server(self.address.display, facts)
            self.galera = facts.get("wsrep_on", "OFF") == "ON"
            self._refuse_galera()
            if self.galera:
                self._check_clock(connection, until)
            settings = self._settings(facts) + (b"; " + more if more else b"")
            connection.checked(connection.request(settings, until))
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse_galera(self) -> None:
        if self.galera and self.mode == "advisory":
            raise Unsupported(
                f"{self.address.display} is a Galera cluster, where GET_LOCK locks one node only: "
                "use lease rows (without mode=advisory)"
            )

    def _check_clock(self, connection: Connection, until: float) -> None:
        """Every node ends holds by a clock of its own: they must agree."""
        before = wall()
        reply = connection.request(b"SELECT " + UTC_MICROS.encode(), until)
        told = int(connection.checked(reply)[0].rows[0][0] or 0) / MICROS
        ahead = ahead_seconds(told, before, wall())
        if abs(ahead) > MOST_SKEW_SECONDS:
            raise BackendUnavailable(
                f"{self.address.display} is a Galera node whose clock is {abs(ahead):.1f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} this host's: holds would end at another "
                f"time there than on other nodes. {MOST_SKEW_SECONDS:g} s are allowed: set both "
                "clocks (NTP)"
            )

    def _settings(self, facts: dict[str, str]) -> bytes:
        # The server can't log statements of READ COMMITTED as statements.
        as_text = facts.get("log_bin") == "ON" and facts.get("binlog_format") == "STATEMENT"
        level = b"REPEATABLE READ" if as_text else b"READ COMMITTED"
        skew = SKEW_MICROS if self.galera else 0
        return _SESSION % (max(1, int(self.settings.request_seconds)), skew, level)

    def enter(self, until: float) -> Connection:
        """A connection that found our tables."""
        connection = self.greet(until)
        try:
            self._enter(connection, until)
        except BaseException:
            connection.close()
            raise
        return connection

    def _enter(self, connection: Connection, until: float) -> None:
        kept = self._protocol(connection, until)
        if kept is None:
            self._insert_protocol(connection, until)
            kept = self._protocol(connection, until)
        if not self._checked:
            self._check_engines(connection, until)
            self._checked = True
        version, mode = kept or (PROTOCOL, self.mode)
        self._compare(version, mode)

    def _protocol(self, connection: Connection, until: float) -> tuple[int, str] | None:
        ask = self.schema.filled("SELECT version, mode FROM @protocol WHERE namespace = ")
        sql = ask.encode() + quoted(self.settings.namespace.encode())
        try:
            results = connection.checked(connection.request(sql, until))
        except Refused as error:
            if error.code in NO_RIGHTS:
                raise Unsupported(f"{error}. {self._rights()}") from None
            if error.code != NO_TABLE:
                raise
            self._create(connection, until)
            return None
        for version, mode in results[0].rows:
            return int(version or 0), (mode or b"").decode()
        return None

    def _insert_protocol(self, connection: Connection, until: float) -> None:
        sql = self.schema.filled("INSERT IGNORE INTO @protocol VALUES (").encode()
        values = (quoted(self.settings.namespace.encode()), PROTOCOL, quoted(self.mode.encode()))
        sql += b"%s, %d, %s)" % values
        try:
            connection.checked(connection.request(sql, until))
        except Refused as error:
            if error.code in NO_RIGHTS:
                raise Unsupported(f"{error}. {self._rights()}") from None
            raise

    def _rights(self) -> str:
        return (
            "This account needs SELECT, INSERT, UPDATE and DELETE on all tables whose names begin "
            f"with {self.schema.prefix!r}"
        )

    def _create(self, connection: Connection, until: float) -> None:
        try:
            connection.checked(connection.request(self.schema.sql().rstrip(" ;\n").encode(), until))
        except Refused as error:
            if error.code not in NO_RIGHTS:
                raise
            raise Unsupported(
                f"{error}. Holdfast's tables are missing, or older than this version, and this "
                "account may not make them: let somebody who may run what `holdfast schema mysql` "
                f"prints, which is\n{self.schema.sql()}"
            ) from None

    def _check_engines(self, connection: Connection, until: float) -> None:
        names = b", ".join(quoted((self.schema.prefix + table).encode()) for table in TABLES)
        sql = (
            b"SELECT TABLE_NAME, ENGINE FROM information_schema.TABLES "
            b"WHERE TABLE_SCHEMA = DATABASE() AND CAST(TABLE_NAME AS BINARY) IN (%s)" % names
        )
        results = connection.checked(connection.request(sql, until))
        if len(results[0].rows) < len(TABLES):
            self._create(connection, until)
        for table, engine in results[0].rows:
            if (engine or b"").lower() != b"innodb":
                raise Unsupported(
                    f"the table {(table or b'').decode()} on {self.address.display} is of "
                    f"{(engine or b'?').decode()}, which has no transactions: InnoDB is needed"
                )

    def _compare(self, version: int, mode: str) -> None:
        namespace, server = self.settings.namespace, self.address.display
        if version != PROTOCOL:
            raise Incompatible(
                f"the namespace {namespace!r} on {server} is used with protocol {version}, "
                f"which this version (protocol {PROTOCOL}) can't share locks with"
            )
        if mode != self.mode:
            raise Incompatible(
                f"the namespace {namespace!r} on {server} is used in {mode} mode, whose locks do "
                f"not exclude those of {self.mode} mode. Use another namespace, or, when nobody "
                f"uses it any more, delete its row in {self.schema.filled('@protocol')}"
            )


def ahead_seconds(told: float, before: float, after: float) -> float:
    """How far a clock is ahead that told its time between two moments of ours; 0 if that can't be
    said.

    >>> ahead_seconds(105.0, 100.0, 101.0), ahead_seconds(100.5, 100.0, 101.0)
    (4.0, 0.0)
    """
    return told - min(max(told, before), after)


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


class Store:
    """What both modes have: a dialler, and a wire for short requests."""

    mode: str
    shortest_ttl = 0.05
    whole_seconds = False

    def __init__(self, url: Url, settings: Settings) -> None:
        self.display = str(url)
        self._settings = settings
        self._dialler = Dialler(url, settings, self.mode)

    def _wire(self, runtime: Runtime) -> Wire:
        return make_wire(runtime, self._dialler.enter, self._settings, self.display)

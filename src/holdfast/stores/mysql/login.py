"""Logging in to MySQL: where a URL points, TLS, and one deadline over the whole login.

PyMySQL does the handshake, on a socket that is opened here. This is the only way in which
Holdfast connects, for a store and for a resource alike. It knows private parts of PyMySQL
(``_read_bytes``, ``_sock``, ``_secure``), so the versions of PyMySQL that are taken have an end.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, NamedTuple

import pymysql

from holdfast.errors import BackendUnavailable, HoldfastError, Unsupported
from holdfast.io.clock import now
from holdfast.url import Url

__all__ = ["OPTIONS", "Address", "address_of", "log_in"]

OPTIONS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_mode", "unix_socket")
"""How a connection is made."""
SSL_MODES = ("disabled", "required", "verify_ca", "verify_identity")
OLDEST_PYMYSQL = (1, 2)
"""Older ones log in without TLS where the server says that it has none, whatever was asked for."""
MOST_LOGIN_BYTES = 1 << 20
"""More than all packets of a login ever have; a server may announce any number."""
CLEAR_TEXT = ("mysql_clear_password", "dialog", "mysql_old_password")
"""Ways to prove a password that give it away to whoever reads the connection."""


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

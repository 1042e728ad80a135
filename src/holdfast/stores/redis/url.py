"""The settings of a Redis store, read from a URL or from a user's redis-py client: addresses,
login, TLS and options. redis-py itself is not used: what it is given by its user is read.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.contract import Settings
from holdfast.io.clock import now
from holdfast.url import Url

__all__ = ["Access", "Greeting", "NodeAddress", "RedisOptions", "access_options", "read_options"]

PORT, SENTINEL_PORT = 6379, 26379
CLIENT_NAME = "holdfast"
"""What CLIENT LIST shows if the URL, or the user's client, gives no name."""
_BEHAVIOUR = ("loss_protection", "max_ttl", "replicas", "allow_eviction", "interop")
_ACCESS = ("db", "tls", "client_name", "sentinel_username", "sentinel_password")
_TLS = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_ca_data",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_ciphers",
)
_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


class NodeAddress(NamedTuple):
    """The address of a node: host and port, or the path of a UNIX socket with port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Greeting(NamedTuple):
    """The first command on every new connection, and the function that checks its reply.

    ``judge`` raises if the server must not be used.
    """

    packed: bytes
    judge: Callable[[Any], None]


# Settings of a user's client that say where to connect and as which user. The others say how that
# client behaves, and are ignored.
_TAKEN = frozenset({"db", "username", "password", "credential_provider", "client_name"})


def access_options(options: dict[str, Any]) -> dict[str, Any]:
    """Selects the settings of a redis-py connection that concern access: login, database, TLS."""
    return {
        key: value
        for key, value in options.items()
        if value is not None and (key in _TAKEN or key.startswith("ssl_"))
    }


class Access:
    """How to log in at any node: plain or TLS, with one login and one database."""

    def __init__(self, *, tls: bool, options: dict[str, Any], request_seconds: float) -> None:
        self.tls = tls
        self.options = options
        """By the names that redis-py gives them."""
        self.request_seconds = request_seconds
        self.client_name: str = options.get("client_name", CLIENT_NAME)
        """For CLIENT SETNAME; empty if nothing is to be sent."""
        self._context: tuple[list[float], ssl.SSLContext] | None = None
        if tls:
            _check_tls(options)

    def seconds_until(self, until: float | None) -> float:
        """The timeout of a request that must end by ``until``."""
        if until is None:
            return self.request_seconds
        return max(0.001, min(self.request_seconds, until - now()))

    def context(self) -> ssl.SSLContext:
        """What TLS connections are made with. Certificates that were replaced are read again."""
        changed = [_changed(self.options[name]) for name in _FILES if name in self.options]
        if self._context is None or self._context[0] != changed:
            self._context = changed, _make_context(self.options)
        return self._context[1]


def _changed(path: str) -> float:
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return 0.0  # reading it says more


def _check_tls(options: dict[str, Any]) -> None:
    """Refuses options that can't be followed, rather than to do without what they ask for."""
    verify = options.get("ssl_cert_reqs", "required")
    if verify not in _VERIFY and not isinstance(verify, ssl.VerifyMode):
        raise ValueError(f"ssl_cert_reqs={verify!r}: use none, optional or required")
    if options.get("ssl_validate_ocsp") or options.get("ssl_validate_ocsp_stapled"):
        raise ValueError("ssl_validate_ocsp: Holdfast's own connections do not validate OCSP")


def _make_context(options: dict[str, Any]) -> ssl.SSLContext:
    given: Callable[..., Any] = options.get
    verify = given("ssl_cert_reqs", "required")
    context = ssl.create_default_context()
    mode: Any = _VERIFY.get(verify, verify)
    context.check_hostname = mode != ssl.CERT_NONE and given("ssl_check_hostname", True)
    context.verify_mode = mode
    for flag in given("ssl_include_verify_flags", ()):
        context.verify_flags |= flag
    for flag in given("ssl_exclude_verify_flags", ()):
        context.verify_flags &= ~flag
    if given("ssl_certfile") or given("ssl_keyfile"):
        context.load_cert_chain(given("ssl_certfile"), given("ssl_keyfile"), given("ssl_password"))
    trusted = [given(name) for name in ("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data")]
    if any(trusted):
        context.load_verify_locations(*trusted)
    if given("ssl_min_version") is not None:
        context.minimum_version = given("ssl_min_version")
    if given("ssl_ciphers"):
        context.set_ciphers(given("ssl_ciphers"))
    return context


@dataclass(frozen=True)
class RedisOptions:
    """All settings of a Redis store."""

    display: str
    nodes: tuple[NodeAddress, ...]
    access: Access = field(repr=False)
    service: str = ""
    """The name of the master, if the nodes are sentinels."""
    sentinel_access: Access | None = field(default=None, repr=False)
    cluster: bool = False
    loss_protection: bool = False
    max_ttl: float = 60.0
    replicas: int = 0
    allow_eviction: bool = False
    interop: bool = False


def read_options(url: Url, settings: Settings) -> RedisOptions:
    """Reads all settings, without network access. Raises ``ValueError`` for invalid ones."""
    url.refuse_unknown(*_BEHAVIOUR, *_ACCESS, *_TLS)
    behaviour = _behaviour(url)
    if settings.client is not None:
        options = _from_client(settings.client, settings, behaviour)
    else:
        options = _from_url(url, settings, behaviour)
    if options.cluster and options.loss_protection:
        raise ValueError(
            "loss_protection is not available on a cluster: its nodes lose data one by one, "
            "and a script sees only the data of its own node"
        )
    return options


def _behaviour(url: Url) -> dict[str, Any]:
    interop = url.options.get("interop", "")
    if interop not in ("", "redis-py"):
        raise ValueError(f"interop={interop!r}: only redis-py is supported")
    replicas = url.number("replicas", 0)
    if replicas != int(replicas):
        raise ValueError(f"replicas={replicas}: must be a whole number")
    max_ttl = url.number("max_ttl", 60.0)
    if max_ttl <= 0:
        raise ValueError("max_ttl must be more than 0")
    loss_protection = url.flag("loss_protection")
    if "max_ttl" in url.options and not loss_protection:
        raise ValueError("max_ttl needs loss_protection=on")
    return {
        "loss_protection": loss_protection,
        "max_ttl": max_ttl,
        "replicas": int(replicas),
        "allow_eviction": url.flag("allow_eviction"),
        "interop": bool(interop),
    }


def _from_url(url: Url, settings: Settings, behaviour: dict[str, Any]) -> RedisOptions:
    tls = url.scheme == "rediss" or url.flag("tls")
    login: dict[str, Any] = {"username": url.username, "password": url.password}
    options = access_options({**login, **url.options, "db": _database(url)})
    for key in ("ssl_check_hostname",):
        if key in options:
            options[key] = url.flag(key)
    access = Access(tls=tls, options=options, request_seconds=settings.request_seconds)
    if url.scheme == "unix":
        if not url.path:
            raise ValueError("unix:// needs the path of a socket: unix:///run/redis.sock")
        return RedisOptions(str(url), (NodeAddress(url.path, 0),), access, **behaviour)
    port = SENTINEL_PORT if url.scheme == "redis+sentinel" else PORT
    nodes = tuple(NodeAddress(host, given or port) for host, given in url.hosts)
    if not nodes and url.scheme in ("redis", "rediss"):
        nodes = (NodeAddress("localhost", PORT),)
    _check_count(url, nodes)
    if url.scheme == "redis+sentinel":
        behaviour |= {"service": _service(url), "sentinel_access": _sentinel_access(url, access)}
    return RedisOptions(str(url), nodes, access, cluster=url.scheme == "redis+cluster", **behaviour)


def _check_count(url: Url, nodes: tuple[NodeAddress, ...]) -> None:
    if not nodes:
        raise ValueError(f"{url.scheme}:// needs at least one host")
    if len(nodes) > 1 and url.scheme in ("redis", "rediss"):
        raise ValueError(
            f"{url.scheme}:// takes one server; for several hosts use redis+sentinel://, "
            "redis+cluster:// or redlock://"
        )


def _database(url: Url) -> int:
    path = url.path.strip("/")
    if url.scheme == "unix":
        path = ""
    elif url.scheme == "redis+sentinel":
        path = path.partition("/")[2]
    text = url.options.get("db", path) or "0"
    if not text.isdecimal():
        raise ValueError(f"not a database number: {text!r}")
    if url.scheme == "redis+cluster" and int(text):
        raise ValueError("a cluster has database 0 only")
    return int(text)


def _service(url: Url) -> str:
    service = url.path.strip("/").partition("/")[0]
    if not service:
        raise ValueError("redis+sentinel://host,host,host/NAME needs the name of the master")
    return service


def _sentinel_access(url: Url, access: Access) -> Access:
    login = {
        "username": url.options.get("sentinel_username"),
        "password": url.options.get("sentinel_password"),
    }
    trust = {key: value for key, value in access.options.items() if key.startswith("ssl_")}
    options = access_options({**login, **trust})
    return Access(tls=access.tls, options=options, request_seconds=access.request_seconds)


def _from_client(client: Any, settings: Settings, behaviour: dict[str, Any]) -> RedisOptions:
    """Reads addresses and login from a redis-py client; its connections are never used."""
    manager = getattr(client, "nodes_manager", None)
    if manager is not None:
        return _from_cluster_client(client, manager, settings, behaviour)
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        raise TypeError(f"not a redis-py client: {type(client).__name__}")
    given: dict[str, Any] = pool.connection_kwargs
    tls = _is_tls(pool.connection_class, given)
    access = Access(
        tls=tls, options=access_options(given), request_seconds=settings.request_seconds
    )
    sentinels = getattr(pool, "sentinel_manager", None)
    if sentinels is not None:
        return _from_sentinels(sentinels, pool.service_name, access, behaviour)
    if given.get("path"):
        return RedisOptions(
            f"unix://{given['path']}", (NodeAddress(given["path"], 0),), access, **behaviour
        )
    address = NodeAddress(given.get("host") or "localhost", int(given.get("port") or PORT))
    display = f"{'rediss' if tls else 'redis'}://{address}/{given.get('db') or 0}"
    return RedisOptions(display, (address,), access, **behaviour)


def _from_sentinels(
    manager: Any, service: str, access: Access, behaviour: dict[str, Any]
) -> RedisOptions:
    nodes, sentinel_options = [], {}
    for sentinel in manager.sentinels:
        given = sentinel.connection_pool.connection_kwargs
        nodes.append(NodeAddress(given["host"], int(given["port"])))
        sentinel_options = access_options(given)
    tls = bool(nodes) and _is_tls(manager.sentinels[0].connection_pool.connection_class, {})
    sentinel_access = Access(
        tls=tls, options=sentinel_options, request_seconds=access.request_seconds
    )
    display = f"redis+sentinel://{','.join(map(str, nodes))}/{service}"
    behaviour |= {"service": service, "sentinel_access": sentinel_access}
    return RedisOptions(display, tuple(nodes), access, **behaviour)


def _from_cluster_client(
    client: Any, manager: Any, settings: Settings, behaviour: dict[str, Any]
) -> RedisOptions:
    given: dict[str, Any] = getattr(client, "connection_kwargs", None) or manager.connection_kwargs
    nodes = tuple(NodeAddress(node.host, int(node.port)) for node in manager.startup_nodes.values())
    tls = bool(given.get("ssl")) or _is_tls(given.get("connection_class"), given)
    access = Access(
        tls=tls, options=access_options(given), request_seconds=settings.request_seconds
    )
    display = f"redis+cluster://{','.join(map(str, nodes))}"
    return RedisOptions(display, nodes, access, cluster=True, **behaviour)


def _is_tls(connection_class: Any, given: dict[str, Any]) -> bool:
    return "SSL" in getattr(connection_class, "__name__", "") or bool(given.get("ssl"))

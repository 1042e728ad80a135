"""What a Redis URL or a user's own client says: where to connect, as whom, and what to promise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.core.contract import Settings
from holdfast.stores.redis.connection import Access, Address, link_options
from holdfast.url import Url

__all__ = ["Options", "read_options"]

PORT, SENTINEL_PORT = 6379, 26379
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


@dataclass(frozen=True)
class Options:
    """All settings of a Redis store."""

    display: str
    nodes: tuple[Address, ...]
    access: Access = field(repr=False)
    service: str = ""
    """The master's name, where the nodes are sentinels."""
    sentinel_access: Access | None = field(default=None, repr=False)
    cluster: bool = False
    loss_protection: bool = False
    max_ttl: float = 60.0
    replicas: int = 0
    allow_eviction: bool = False
    interop: bool = False


def read_options(url: Url, settings: Settings) -> Options:
    """Raises ``ValueError`` for what can't be, before anything touches the network."""
    url.refuse_unknown(*_BEHAVIOUR, *_ACCESS, *_TLS)
    behaviour = _behaviour(url)
    if settings.client is not None:
        options = _from_client(settings.client, settings, behaviour)
    else:
        options = _from_url(url, settings, behaviour)
    if options.cluster and options.loss_protection:
        raise ValueError(
            "loss_protection can't be had on a cluster: its nodes lose data one by one, "
            "and no script sees more than its own"
        )
    return options


def _behaviour(url: Url) -> dict[str, Any]:
    interop = url.options.get("interop", "")
    if interop not in ("", "redis-py"):
        raise ValueError(f"interop={interop!r}: it knows redis-py only")
    replicas = url.number("replicas", 0)
    if replicas != int(replicas):
        raise ValueError(f"replicas={replicas}: a whole number")
    max_ttl = url.number("max_ttl", 60.0)
    if max_ttl <= 0:
        raise ValueError("max_ttl must be more than 0")
    loss_protection = url.flag("loss_protection")
    if "max_ttl" in url.options and not loss_protection:
        raise ValueError("max_ttl belongs to loss_protection=on")
    return {
        "loss_protection": loss_protection,
        "max_ttl": max_ttl,
        "replicas": int(replicas),
        "allow_eviction": url.flag("allow_eviction"),
        "interop": bool(interop),
    }


def _from_url(url: Url, settings: Settings, behaviour: dict[str, Any]) -> Options:
    tls = url.scheme == "rediss" or url.flag("tls")
    login: dict[str, Any] = {"username": url.username, "password": url.password}
    options = link_options({**login, **url.options, "db": _database(url)})
    for key in ("ssl_check_hostname",):
        if key in options:
            options[key] = url.flag(key)
    access = Access(tls=tls, options=options, request_seconds=settings.request_seconds)
    if url.scheme == "unix":
        if not url.path:
            raise ValueError("unix:// needs the path of a socket: unix:///run/redis.sock")
        return Options(str(url), (Address(url.path, 0),), access, **behaviour)
    port = SENTINEL_PORT if url.scheme == "redis+sentinel" else PORT
    nodes = tuple(Address(host, given or port) for host, given in url.hosts)
    if not nodes and url.scheme in ("redis", "rediss"):
        nodes = (Address("localhost", PORT),)
    _check_count(url, nodes)
    if url.scheme == "redis+sentinel":
        behaviour |= {"service": _service(url), "sentinel_access": _sentinel_access(url, access)}
    return Options(str(url), nodes, access, cluster=url.scheme == "redis+cluster", **behaviour)


def _check_count(url: Url, nodes: tuple[Address, ...]) -> None:
    if not nodes:
        raise ValueError(f"{url.scheme}:// needs at least one host")
    if len(nodes) > 1 and url.scheme in ("redis", "rediss"):
        raise ValueError(
            f"{url.scheme}:// is one server; several hosts are redis+sentinel://, "
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
    options = link_options({**login, **trust})
    return Access(tls=access.tls, options=options, request_seconds=access.request_seconds)


def _from_client(client: Any, settings: Settings, behaviour: dict[str, Any]) -> Options:
    """Takes where and as whom from a redis-py client, never its connections."""
    manager = getattr(client, "nodes_manager", None)
    if manager is not None:
        return _from_cluster_client(client, manager, settings, behaviour)
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        raise TypeError(f"not a redis-py client: {type(client).__name__}")
    given: dict[str, Any] = pool.connection_kwargs
    tls = _is_tls(pool.connection_class, given)
    access = Access(tls=tls, options=link_options(given), request_seconds=settings.request_seconds)
    sentinels = getattr(pool, "sentinel_manager", None)
    if sentinels is not None:
        return _from_sentinels(sentinels, pool.service_name, access, behaviour)
    if given.get("path"):
        return Options(f"unix://{given['path']}", (Address(given["path"], 0),), access, **behaviour)
    address = Address(given.get("host") or "localhost", int(given.get("port") or PORT))
    display = f"{'rediss' if tls else 'redis'}://{address}/{given.get('db') or 0}"
    return Options(display, (address,), access, **behaviour)


def _from_sentinels(
    manager: Any, service: str, access: Access, behaviour: dict[str, Any]
) -> Options:
    nodes, sentinel_options = [], {}
    for sentinel in manager.sentinels:
        given = sentinel.connection_pool.connection_kwargs
        nodes.append(Address(given["host"], int(given["port"])))
        sentinel_options = link_options(given)
    tls = bool(nodes) and _is_tls(manager.sentinels[0].connection_pool.connection_class, {})
    sentinel_access = Access(
        tls=tls, options=sentinel_options, request_seconds=access.request_seconds
    )
    display = f"redis+sentinel://{','.join(map(str, nodes))}/{service}"
    behaviour |= {"service": service, "sentinel_access": sentinel_access}
    return Options(display, tuple(nodes), access, **behaviour)


def _from_cluster_client(
    client: Any, manager: Any, settings: Settings, behaviour: dict[str, Any]
) -> Options:
    given: dict[str, Any] = getattr(client, "connection_kwargs", None) or manager.connection_kwargs
    nodes = tuple(Address(node.host, int(node.port)) for node in manager.startup_nodes.values())
    tls = bool(given.get("ssl")) or _is_tls(given.get("connection_class"), given)
    access = Access(tls=tls, options=link_options(given), request_seconds=settings.request_seconds)
    display = f"redis+cluster://{','.join(map(str, nodes))}"
    return Options(display, nodes, access, cluster=True, **behaviour)


def _is_tls(connection_class: Any, given: dict[str, Any]) -> bool:
    return "SSL" in getattr(connection_class, "__name__", "") or bool(given.get("ssl"))

"""The options of a ``redlock://`` URL: the masters, the login and the longest ttl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.core.contract import Settings
from holdfast.stores.redis.url import Access, NodeAddress, access_options
from holdfast.url import Url

__all__ = ["RedlockOptions", "read_options"]

PORT = 6379
SIZES = (3, 5, 7)
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
_OPTIONS = ("db", "tls", "client_name", "loss_protection", "max_ttl", "allow_eviction", *_TLS)


@dataclass(frozen=True)
class RedlockOptions:
    """All settings of a Redlock store."""

    display: str
    nodes: tuple[NodeAddress, ...]
    access: Access = field(repr=False)
    loss_protection: bool = True
    max_ttl: float = 60.0
    allow_eviction: bool = False

    @property
    def quorum(self) -> int:
        return len(self.nodes) // 2 + 1


def read_options(url: Url, settings: Settings) -> RedlockOptions:
    """Return the options of a URL. Raises ``ValueError`` if they are invalid; no network access."""
    url.refuse_unknown(*_OPTIONS)
    nodes = tuple(NodeAddress(host, port or PORT) for host, port in url.hosts)
    _check_nodes(nodes)
    loss_protection = url.flag("loss_protection", default=True)
    max_ttl = url.number("max_ttl", 60.0)
    if max_ttl <= 0:
        raise ValueError("max_ttl must be more than 0")
    if "max_ttl" in url.options and not loss_protection:
        raise ValueError("max_ttl belongs to loss_protection=on")
    login: dict[str, Any] = {"username": url.username, "password": url.password}
    options = access_options({**login, **url.options, "db": _database(url)})
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = url.flag("ssl_check_hostname")
    access = Access(tls=url.flag("tls"), options=options, request_seconds=settings.request_seconds)
    allow_eviction = url.flag("allow_eviction")
    return RedlockOptions(str(url), nodes, access, loss_protection, max_ttl, allow_eviction)


def _check_nodes(nodes: tuple[NodeAddress, ...]) -> None:
    count = len(nodes)
    if len(set(nodes)) != count:
        raise ValueError("redlock:// names a host twice: a majority needs independent servers")
    if count in SIZES:
        return
    if count and count % 2 == 0:
        raise ValueError(
            f"redlock:// with {count} hosts survives no more failures than with {count - 1}: "
            "use 3, 5 or 7"
        )
    raise ValueError(f"redlock:// takes 3, 5 or 7 independent masters, not {count}")


def _database(url: Url) -> int:
    text = url.options.get("db", url.path.strip("/")) or "0"
    if not text.isdecimal():
        raise ValueError(f"not a database number: {text!r}")
    return int(text)

"""``consul://[:token@]host[:8500],…``, and ``consuls://`` with ``?ca=&cert=&key=``."""

from __future__ import annotations

import os
from typing import NamedTuple

from holdfast.core.contract import Settings
from holdfast.stores._consensus.hosts import Hosts, Tls
from holdfast.stores.consul.agent import AgentEndpoint
from holdfast.url import Url

__all__ = ["Options", "read_options"]

DEFAULT_PORT = 8500
DEFAULT_TLS_PORT = 8501
SESSION_TTL_MIN = 10.0  # Consul's own default
LONGEST_LOCK_DELAY = 60.0  # Consul's own limit

CLOSED_HINT = (
    "Consul closes connections like this when one address has more than http_max_conns_per_client"
)


class Options(NamedTuple):
    """What a URL says."""

    endpoint: AgentEndpoint
    shortest_ttl: float
    lock_delay: float


def read_options(url: Url, settings: Settings) -> Options:
    """Reads a URL and the environment. Raises ``ValueError`` for what has no meaning here."""
    url.refuse_unknown("ca", "cert", "key", "token", "session_ttl_min", "lock_delay")
    if url.path not in ("", "/"):
        raise ValueError("consul:// takes no path; use a namespace to separate locks")
    if url.username:
        raise ValueError("consul:// has no user name; a token is written consul://:token@host")
    env = os.environ
    token = url.options.get("token") or url.password or env.get("CONSUL_HTTP_TOKEN", "")
    tls, default_port = None, DEFAULT_PORT
    if url.scheme == "consuls":
        default_port = DEFAULT_TLS_PORT
        tls = Tls(
            url.options.get("ca", env.get("CONSUL_CACERT", "")),
            url.options.get("cert", env.get("CONSUL_CLIENT_CERT", "")),
            url.options.get("key", env.get("CONSUL_CLIENT_KEY", "")),
        )
    elif url.options.keys() & {"ca", "cert", "key"}:
        raise ValueError("ca, cert and key need consuls://")
    hosts = tuple((host, port or default_port) for host, port in url.hosts)
    known = Hosts(
        str(url),
        hosts or (("localhost", default_port),),
        tls=tls,
        request_seconds=settings.request_seconds,
    )
    known.closed_hint = CLOSED_HINT
    if not token.isascii() or (token and not token.isprintable()):
        raise ValueError("a Consul token is printable ASCII")
    shortest_ttl = url.number("session_ttl_min", SESSION_TTL_MIN)
    return Options(AgentEndpoint(known, token.encode()), shortest_ttl, _lock_delay(url))


def _lock_delay(url: Url) -> float:
    seconds = url.number("lock_delay", 0.0)
    if not 0 <= seconds <= LONGEST_LOCK_DELAY:
        raise ValueError(f"lock_delay is 0 to {LONGEST_LOCK_DELAY:g} seconds, not {seconds:g}")
    return seconds

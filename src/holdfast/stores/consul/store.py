"""``consul://`` and ``consuls://``: locks on Consul's key-value store and sessions.

Read in this order: ``consul_requests`` (what is stored), ``consul_backend`` (how claims are
admitted), ``consul_sessions`` (what keeps them alive), ``consul_view`` (what people are shown).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.core.contract import Guarantee, Runtime, Settings
from holdfast.io.http import IndexedResponses, Servers, Tls
from holdfast.stores._consensus.sessions import Sessions
from holdfast.stores.consul.backend import ConsulBackend
from holdfast.stores.consul.requests import Names
from holdfast.stores.consul.session import Held, Ref
from holdfast.url import Url

__all__ = ["ConsulStore", "Place", "open_store"]

DEFAULT_PORT = 8500
DEFAULT_TLS_PORT = 8501
REMEMBERED = 10_000
SESSION_TTL_MIN = 10.0  # Consul's own default
LONGEST_LOCK_DELAY = 60.0  # Consul's own


class Place(NamedTuple):
    """A place in a line that this client has."""

    order: int
    changed: int
    since: float
    behind: int
    front: tuple[str, ...]
    """The entries that it has to wait for, in order. None is ever added."""


class ConsulStore:
    """One Consul datacenter, for one client."""

    guarantees = frozenset(Guarantee)
    longest_ttl = 86_400.0
    whole_seconds = True

    def __init__(
        self, servers: Servers, settings: Settings, shortest_ttl: float, lock_delay: float = 0.0
    ) -> None:
        self.display = servers.display
        self.servers, self.settings, self.shortest_ttl = servers, settings, shortest_ttl
        self.lock_delay = lock_delay
        """How long Consul keeps others out after a session of this client's has ended."""
        self.names = Names(settings.namespace)
        self.sessions = Sessions()
        self.places: dict[str, Place] = {}
        """By owner: the claims of this client that stand in a line."""
        self.waiting: dict[tuple[str, int], None] = {}
        """Entries of anybody's that did not fit when they came, by key and order."""
        self.holds: dict[str, Held] = {}
        self.moved: dict[str, Ref] = {}
        """Holds that were bound to another session after their grant."""
        self.moving: dict[str, Ref] = {}
        """Where holds may be bound to by now: the request had no answer."""
        self.backends: set[int] = set()
        """Which backends are open: the last one to close ends the sessions."""

    def backend(self, runtime: Runtime) -> ConsulBackend:
        return ConsulBackend(self, runtime)

    def remember(self, waiting: Iterable[tuple[str, int]]) -> None:
        """Who was seen to wait holds only once it says so."""
        for entry in waiting:
            self.waiting[entry] = None
        while len(self.waiting) > REMEMBERED:
            self.waiting.pop(next(iter(self.waiting), ("", 0)), None)

    def forgotten(self, owner: str) -> None:
        """Nothing more is known of a claim."""
        self.places.pop(owner, None)
        self.holds.pop(owner, None)
        self.moved.pop(owner, None)
        self.moving.pop(owner, None)


def open_store(url: Url, settings: Settings) -> ConsulStore:
    """``consul://[:token@]host[:8500],…``; ``consuls://`` with ``?ca=&cert=&key=``."""
    url.refuse_unknown("ca", "cert", "key", "token", "session_ttl_min", "lock_delay")
    if url.path not in ("", "/"):
        raise ValueError("consul:// has no path; a namespace keeps locks apart")
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
        raise ValueError("certificates are for consuls://")
    hosts = tuple((host, port or default_port) for host, port in url.hosts)
    servers = Servers(
        str(url),
        hosts or (("localhost", default_port),),
        tls=tls,
        request_seconds=settings.request_seconds,
        responses=IndexedResponses,
    )
    if token:
        if not token.isascii() or not token.isprintable():
            raise ValueError("a Consul token is printable ASCII")
        servers.headers = b"X-Consul-Token: %b\r\n" % token.encode()
    shortest_ttl = url.number("session_ttl_min", SESSION_TTL_MIN)
    return ConsulStore(servers, settings, shortest_ttl, _lock_delay(url))


def _lock_delay(url: Url) -> float:
    seconds = url.number("lock_delay", 0.0)
    if not 0 <= seconds <= LONGEST_LOCK_DELAY:
        raise ValueError(f"lock_delay is 0 to {LONGEST_LOCK_DELAY:g} seconds, not {seconds:g}")
    return seconds

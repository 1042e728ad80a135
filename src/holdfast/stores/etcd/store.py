"""``etcd://`` and ``etcds://``: locks on etcd's v3 JSON gateway.

Read in this order: ``etcd_requests`` and ``etcd_tags`` (what is stored), ``etcd_backend`` and
``etcd_join`` (how claims are admitted), ``etcd_leave`` (how they end, and who is next),
``etcd_leases`` and ``etcd_renew`` (what keeps them alive), ``etcd_wait`` and ``etcd_watch`` (how
waiters are woken), ``etcd_view`` (what people are shown).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast.claim import Claim
from holdfast.core.contract import Guarantee, Runtime, Settings
from holdfast.core.ordered import Entry, Verdict, judge
from holdfast.io.http import Servers, Tls
from holdfast.stores._consensus.sessions import Sessions
from holdfast.stores.etcd.backend import EtcdBackend
from holdfast.stores.etcd.gateway import Credentials
from holdfast.stores.etcd.keys import Tags
from holdfast.stores.etcd.requests import Names
from holdfast.stores.etcd.session import Place
from holdfast.url import Url

__all__ = ["EtcdStore", "open_store"]

DEFAULT_PORT = 2379
LONGEST_TTL = 9_000_000_000.0  # etcd's own


class EtcdStore:
    """One etcd cluster, for one client."""

    guarantees = frozenset(Guarantee)
    shortest_ttl = 2.0
    longest_ttl = LONGEST_TTL
    whole_seconds = True

    def __init__(self, servers: Servers, credentials: Credentials, settings: Settings) -> None:
        self.display = servers.display
        self.servers, self.credentials, self.settings = servers, credentials, settings
        self.names = Names(settings.namespace)
        self.sessions = Sessions()
        self.tags = Tags()
        self.places: dict[str, Place] = {}
        """By owner: the claims of this client that stand in a line."""
        self.handed: set[str] = set()
        """Owners that were handed what they hold, whose entries do not say so yet. Apart from the
        places: an answer that comes late may write a place anew."""
        self.backends: set[int] = set()
        """Which backends are open: the last one to close ends the sessions."""

    def backend(self, runtime: Runtime) -> EtcdBackend:
        return EtcdBackend(self, runtime)

    def key(self, claim: Claim) -> bytes:
        """The key of a claim's entry."""
        return self.names.of(claim.name).entry(claim, self.tags.of(claim))

    def judge(self, claim: Claim, line: Sequence[Entry]) -> Verdict:
        """What a line means for a claim, which stands there by its tag."""
        return judge(claim._replace(owner=self.tags.of(claim)), line, self.display)


def open_store(url: Url, settings: Settings) -> EtcdStore:
    """``etcd://[user:password@]host[:2379],…``; ``etcds://`` with ``?ca=&cert=&key=``."""
    url.refuse_unknown("ca", "cert", "key")
    if url.path not in ("", "/"):
        raise ValueError("etcd:// has no path; a namespace keeps locks apart")
    env = os.environ
    user, _, password = env.get("ETCDCTL_USER", "").partition(":")
    if url.username:
        user, password = url.username, url.password or ""
    password = password or env.get("ETCDCTL_PASSWORD", "")
    tls = None
    if url.scheme == "etcds":
        tls = Tls(
            url.options.get("ca", env.get("ETCDCTL_CACERT", "")),
            url.options.get("cert", env.get("ETCDCTL_CERT", "")),
            url.options.get("key", env.get("ETCDCTL_KEY", "")),
        )
    elif url.options:
        raise ValueError("certificates are for etcds://")
    hosts = tuple((host, port or DEFAULT_PORT) for host, port in url.hosts)
    servers = Servers(
        str(url),
        hosts or (("localhost", DEFAULT_PORT),),
        tls=tls,
        request_seconds=settings.request_seconds,
    )
    return EtcdStore(servers, Credentials(user or None, password), settings)

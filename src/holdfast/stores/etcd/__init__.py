"""``etcd://`` and ``etcds://``: locks on etcd's v3 API, over gRPC.

What is stored, below the namespace (``holdfast`` by default)::

    holdfast/locks/<name>/l/w/<key id>           an entry: a writer, holding or waiting
    holdfast/locks/<name>/l/r/<key id>           an entry: a reader
    holdfast/locks/<name>/s/<limit>/<key id>     an entry: slots of a semaphore
        value   [version, weight, state, behind, since, [slots], token, label]
        lease   the session: one etcd lease per client and ttl
        order   its create_revision, which is also the token
    holdfast/guards/<lease>      changed to make a late request of that session void
    holdfast/bells/<lease>       the wake-up key: written to wake a waiter of that session
    holdfast/records/<name>      a record, with an etcd lease of its own

Reading order: ``requests`` and ``keys`` (what is stored), ``backend`` (how claims are admitted and
end), ``session`` (leases, and the renewal of what is bound to them), ``wakeups`` (how waiters
wait), ``inspect`` (the pure parts of survey and probe). Below them: ``calls`` (connections,
sign-in, refusals) and ``messages`` (what is sent and received, as bytes).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from holdfast.core.contract import Settings
from holdfast.url import Url

if TYPE_CHECKING:
    from holdfast.stores.etcd.backend import EtcdStore

__all__ = ["open_store"]

DEFAULT_PORT = 2379


def open_store(url: Url, settings: Settings) -> EtcdStore:
    """Opens the store of ``etcd://[user:password@]host[:2379],…`` or ``etcds://…?ca=&cert=&key=``.

    Does not touch the network. Raises ``ValueError`` for a URL that is not valid.
    """
    from holdfast.stores._consensus.hosts import Hosts, Tls
    from holdfast.stores.etcd.backend import EtcdStore
    from holdfast.stores.etcd.calls import Credentials

    url.refuse_unknown("ca", "cert", "key")
    if url.path not in ("", "/"):
        raise ValueError("etcd:// takes no path; use a namespace to separate locks")
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
        raise ValueError("ca, cert and key need etcds://")
    hosts = tuple((host, port or DEFAULT_PORT) for host, port in url.hosts)
    known = Hosts(
        str(url),
        hosts or (("localhost", DEFAULT_PORT),),
        tls=tls,
        request_seconds=settings.request_seconds,
        alpn="h2",
    )
    return EtcdStore(known, Credentials(user or None, password), settings)

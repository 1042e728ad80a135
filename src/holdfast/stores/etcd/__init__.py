"""``etcd://`` and ``etcds://``: locks on etcd's v3 JSON gateway."""

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
    """``etcd://[user:password@]host[:2379],…``; ``etcds://`` with ``?ca=&cert=&key=``. Nothing
    touches the network yet."""
    from holdfast.io.http import Servers, Tls
    from holdfast.stores.etcd.backend import EtcdStore
    from holdfast.stores.etcd.gateway import Credentials

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

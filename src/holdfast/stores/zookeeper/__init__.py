"""``zookeeper://h1,h2,h3/path``: a queue of ephemeral nodes per name, one session per ttl."""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL; nothing touches the network yet."""
    from holdfast.stores.zookeeper import backend

    return backend.open_store(url, settings)

"""``mysql://``: lease rows by default, named locks (``GET_LOCK``) with ``?mode=advisory``."""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL; nothing touches the network yet."""
    from holdfast.stores.mysql import store

    return store.open_store(url, settings)

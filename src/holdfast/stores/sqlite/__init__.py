"""``local`` and ``sqlite:///path``: locks of one machine, in a file that needs no server."""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL; nothing touches the network yet."""
    from holdfast.stores.sqlite import backend

    return backend.open_store(url, settings)

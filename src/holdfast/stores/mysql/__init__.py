"""``mysql://``: lease rows by default, named locks (``GET_LOCK``) with ``?mode=advisory``."""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL; nothing touches the network yet."""
    from holdfast.stores.mysql.connect import OPTIONS

    url.refuse_unknown(*OPTIONS, "mode", "prefix")
    mode = url.options.get("mode", "lease")
    if mode == "lease":
        from holdfast.stores.mysql.backend import LeaseStore

        return LeaseStore(url, settings)
    if mode == "advisory":
        from holdfast.stores import mysql_advisory

        return mysql_advisory.open_store(url, settings)
    raise ValueError(f"mode={mode!r}: mysql:// has the modes lease and advisory")

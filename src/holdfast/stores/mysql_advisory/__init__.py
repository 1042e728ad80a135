"""``mysql://…?mode=advisory``: named locks (``GET_LOCK``), which end with their connection."""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL whose options ``stores.mysql`` has checked."""
    from holdfast.stores.mysql_advisory.backend import AdvisoryStore

    return AdvisoryStore(url, settings)

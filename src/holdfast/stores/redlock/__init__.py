"""``redlock://h1,h2,h3``: locks that a majority of independent Redis masters grants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.contract import Settings
from holdfast.url import Url

if TYPE_CHECKING:
    from holdfast.stores.redlock.backend import RedlockStore

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> RedlockStore:
    """``redlock://host1,host2,host3``: opens nothing yet; raises ``ValueError`` for a bad URL."""
    from holdfast.stores.redlock.backend import RedlockStore
    from holdfast.stores.redlock.url import read_options

    return RedlockStore(read_options(url, settings), settings)

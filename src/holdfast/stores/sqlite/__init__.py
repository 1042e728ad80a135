"""``local`` and ``sqlite:///path``: locks of one machine, in a file that needs no server.

What is stored, in ``locks.db``::

    meta    one row: the boot whose clock the leases use, and the marks that keep tokens growing
    name    one row per name: its last token, its exclusive hold, and how many rows it has in claim
    claim   one row per waiter, shared hold and slots hold, in order of arrival
    record  one row per record

    locks.db-wake/<pid>-<random>.sock    one datagram socket per client that waits

Read in this order: ``schema`` (what is stored, how the file is opened), ``backend`` (the fast
path, transactions, maintenance), ``queue`` (admission, inside a transaction), ``row`` (checks of
what is read; pure), ``connection`` (one SQLite connection for many threads), ``wakeups``,
``inspect``, ``file`` and ``host`` (where the file may be, and on which machine).
"""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens ``local``, ``sqlite:///path`` or ``sqlite:///path?group=NAME``. Touches no file yet.

    Raises ``ValueError`` for a URL that has no meaning here."""
    from holdfast.stores.sqlite.backend import SqliteStore
    from holdfast.stores.sqlite.file import store_file

    url.refuse_unknown("group", "adopt")
    return SqliteStore(store_file(url), settings, adopt=url.flag("adopt"))

"""``mysql://…?mode=advisory``: named locks of MySQL or MariaDB (``GET_LOCK``).

A hold is a session of the server that has the named lock, so it ends with its connection. One
session holds or waits for one name::

    hf:<digest>            the exclusive lock of a name (digest of namespace and name)
    hf:<digest>:0, :1, …   one lock per slot of a semaphore
    hf:<digest>:t          queue lock: the first waiter for slots has it
    hf:<digest>:n          the session of that waiter, while it waits on the server
    hf:session:<tag>       every session has one: other sessions find and kill it by this lock
    hf:hold:<mark>         marks one hold of a session

    holdfast_counter       the last token of a name, its capacity, and its last holders (for
                           ``inspect``; believed only while the session has the locks)

Tables, connections and records are those of ``stores.mysql``.

Reading order: ``_sql.advisory`` (the rules), ``backend`` (how this server does it), ``sql`` (locks
and statements), ``_sql.session`` (requests on sessions), ``inspect`` (holders and waiters).
"""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL. Does not connect yet. ``stores.mysql`` has checked the options."""
    from holdfast.stores.mysql_advisory.backend import MySqlAdvisoryStore

    return MySqlAdvisoryStore(url, settings)

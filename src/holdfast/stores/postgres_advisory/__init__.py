"""``postgresql://…?mode=advisory``: locks that end with their connection.

A hold is a session on the server that has the advisory lock of the name's key. The keys follow
from a digest of namespace and name (``base``)::

    base            the lock, exclusive or shared
    base + 1        shared by all sessions that hold or wait for slots
    base + 2        the queue of waiters for slots
    base + 3 ...    one key per slot
    base # token    marks the hold of a token (``#`` is SQL's exclusive or)

    counter   one row per name: last token, capacity, and the holders, for people
    queue     one row per waiting session, for people

The server has no token and no owner for an advisory lock, so ``counter`` has them. Connections,
schema and replies are those of ``stores.postgres``; the SQL is in its ``advisory_sql``, as one
script installs both modes. ``backend`` is the store.
"""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL whose options ``stores.postgres.open_store`` has checked."""
    from holdfast.stores.postgres_advisory.backend import PostgresAdvisoryStore

    return PostgresAdvisoryStore(url, settings)

"""``postgresql://``: lease rows by default, advisory locks with ``?mode=advisory``.

The lease store keeps all state of a name in one row, and its queue in a table beside it::

    lock                                  waiter (one row per waiter)
      namespace, name   primary key         namespace, name, place   primary key
      token             last one granted    owner, mode, weight, label
      capacity          of a semaphore      refreshed  by the client that waits
      crowded           are there waiters?  reserved   granted admission until then
      holders[]         owner, token, ends  bell, ring channel and text of its wake-up

    record    values written under a grant      protocol  version and mode of a namespace
    counter   tokens of advisory mode and of ``transaction_lock``
    queue     the waiting sessions of advisory mode, for people

``crowded``, ``bell`` and ``ring`` are stored names: they keep their spelling.

One function call changes a name and locks its row first. Wake-ups are NOTIFY messages on one
LISTEN connection per client.

Reading order: ``sql`` (tables and functions), ``backend`` (their calls), ``replies`` (their
answers), ``wakeups`` (waiting). Below them: ``schema`` (installs the SQL), ``connect`` (opens and
checks a connection), ``connection`` (libpq). ``advisory_sql`` is the SQL of
``stores.postgres_advisory``; ``transaction`` uses its counters for ``transaction_lock``.
"""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of ``postgresql://user:password@host:5432/database``, with options.

    No connection is opened yet. Raises ``ValueError`` for an option or a mode that does not exist.
    """
    from holdfast.stores.postgres.connect import LIBPQ_OPTIONS, OWN_OPTIONS

    url.refuse_unknown(*LIBPQ_OPTIONS, *OWN_OPTIONS)
    mode = url.options.get("mode", "lease")
    if mode == "lease":
        from holdfast.stores.postgres.backend import PostgresLeaseStore

        return PostgresLeaseStore(url, settings)
    if mode == "advisory":
        from holdfast.stores import postgres_advisory

        return postgres_advisory.open_store(url, settings)
    raise ValueError(f"mode={mode!r}: postgresql:// has the modes lease and advisory")

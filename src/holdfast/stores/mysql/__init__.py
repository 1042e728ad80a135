"""``mysql://``: locks in MySQL or MariaDB, as lease rows.

With ``?mode=advisory`` the store is ``stores.mysql_advisory``, which uses the server's named locks
(``GET_LOCK``). Both use the connections, tables and records of this folder.

What is stored, in tables of InnoDB (``sql`` has the columns)::

    holdfast_lock          one row per (namespace, name)
      version              compared and increased by every change of the row
      token                the last fencing token of the name
      owner, label,        the exclusive holder, if there is one
        since, ends
      crowd                one line per entry: shared and slot holders, then the queue
                           "owner mode token ends subscription called since weight limit …"
    holdfast_record        outcomes of ``once`` and ``every``
    holdfast_transaction   locks in the caller's own transaction
    holdfast_counter       tokens and holders of the advisory store
    holdfast_protocol      protocol version and mode of each namespace

A waiting client also has two sessions on the server: one that sleeps until it is killed, and one
that holds the named lock on which the first one sleeps::

    releasing client ──1. mark the first waiter's entry as called──▶ row
                     ──2. KILL QUERY──▶ sleeping session ──▶ waiting client

Reading order: ``backend`` (the operations), ``row`` (the rules, without I/O), ``sql`` (tables and
statements), ``wakeups`` (the sleeping session), ``connect`` (login and checks), ``connection`` and
``protocol`` (requests and replies), ``inspect`` (findings of ``check()``), ``transaction``
(``transaction_lock``).
"""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL, in the mode that its options name. Does not connect yet.

    Raises ``ValueError`` for an unknown option or mode.
    """
    from holdfast.stores.mysql.connect import OPTIONS

    url.refuse_unknown(*OPTIONS, "mode", "prefix")
    mode = url.options.get("mode", "lease")
    if mode == "lease":
        from holdfast.stores.mysql.backend import MySqlLeaseStore

        return MySqlLeaseStore(url, settings)
    if mode == "advisory":
        from holdfast.stores import mysql_advisory

        return mysql_advisory.open_store(url, settings)
    raise ValueError(f"mode={mode!r}: mysql:// has the modes lease and advisory")

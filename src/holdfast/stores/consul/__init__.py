"""``consul://`` and ``consuls://``: locks in Consul's key-value store, kept alive by sessions.

What is stored, with the namespace in front::

    holdfast/locks/<name>/l/w/<owner>                 an exclusive claim, held or waiting
                          l/r/<owner>                 a shared claim, held or waiting
                          s/<limit>.<permits>/<owner> a claim on slots, held or waiting
                          …/<owner>/h                 mark: this claim waited, and holds now
                          n/<number>                  a slot that is taken, with its owner
    holdfast/records/<name>                           a record, bound to no session
    holdfast/guards/<session>                         invalidates late requests of a session

Every key of a claim is locked by one session of its client. The order of arrival is the
CreateIndex of the claim's key; the token is the ModifyIndex of the write that made it a hold.

Read in this order: ``requests`` (keys, transactions, entries; pure), ``backend`` (how claims are
admitted), ``line`` (what a waiting claim knows of the entries in front), ``session`` (what keeps
claims alive), ``wakeups`` (how a claim waits), ``orphans`` (what a lock-delay leaves behind),
``inspect`` (texts and values for people), ``agent`` (Consul's HTTP API), ``url`` (options).
"""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL. Nothing is sent before the first request.

    Raises ``ValueError`` for a URL that has no meaning here."""
    from holdfast.stores.consul.backend import ConsulStore
    from holdfast.stores.consul.url import read_options

    options = read_options(url, settings)
    return ConsulStore(options.endpoint, settings, options.shortest_ttl, options.lock_delay)

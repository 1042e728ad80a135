"""``zookeeper://h1,h2,h3/path``: a queue of ephemeral nodes per name, one session per ttl.

What is stored, below the URL's path (``queue`` reads and writes these names and data)::

    <path>/<namespace>/
        locks/<name>/                                 container node: the queue of a name
            1.x.1.0.<digest of owner>.0000000012      ephemeral: a claim that holds or waits
            1.k.3                                     ephemeral: slot 3 is taken
        records/<name>                                persistent: a record

The lowest sequence numbers that fit together hold; the others wait, each watching one node ahead.

Reading order: ``queue`` (what is stored, and which claims it admits), ``node`` (the claims of this
process), ``backend`` (the contract), ``wakeups`` (how a wait ends), ``session`` (which time is
certain), ``store`` and ``pending`` (what is shared by the backends of a client, and the deletes
that are retried), ``inspect`` (what people are shown), ``url``; in ``client``: ``packets``,
``greeting``, ``connection`` (which threads and tasks share), ``heartbeats``.
"""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """``zookeeper://[user:password@]host[:port][,host…][/path][?options]``; no network access.

    Raises ``ValueError`` for a URL or an option that makes no sense."""
    from holdfast.stores.zookeeper.store import ZooKeeperStore
    from holdfast.stores.zookeeper.url import read_options

    return ZooKeeperStore(read_options(url, settings), url.path.rstrip("/"), settings)

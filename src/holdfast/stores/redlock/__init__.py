"""``redlock://h1,h2,h3``: locks that a majority of 3, 5 or 7 independent Redis masters grants.

Stored on every node::

    <namespace>:redlock:{name}     hash, one per name: fields of ``lua/state.lua``
        c          counter: highest token that this node has granted or accepted
        x xe xt .. exclusive holder: owner, expiry, token, label
        h:<owner>  one reader or slot holder
        i ie       waiting writer that keeps new readers out
    holdfast:redlock:run           hash: the run of the server for which the data is complete
    <namespace>%3Aredlock:wake:..  channel, one per name: releases are published here

A request goes to all nodes at once::

    attempt --> broadcast --> node 1: grant.lua --> vote --+
                         |--> node 2: grant.lua --> vote --+--> Ballot --> grant or busy
                         +--> node 3: grant.lua --> (late)

Reading order: ``backend`` (all methods of the contract), ``votes`` (what the votes mean),
``scripts`` and ``lua/grant.lua`` (how a node votes), ``nodes`` (health of the nodes, one round),
``broadcast_blocking`` and ``broadcast_aio`` (sending), ``wakeups`` (pub/sub), ``inspect``
(replies of look, survey and probe), ``url`` (options).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.contract import Settings
from holdfast.url import Url

if TYPE_CHECKING:
    from holdfast.stores.redlock.backend import RedlockStore

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> RedlockStore:
    """Open the store of a URL; no network access yet. Raises ``ValueError`` for a bad URL."""
    from holdfast.stores.redlock.backend import RedlockStore
    from holdfast.stores.redlock.url import read_options

    return RedlockStore(read_options(url, settings), settings)

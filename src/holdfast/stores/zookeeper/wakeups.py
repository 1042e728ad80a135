"""Waiting: one watch on the node in front, and the look that follows its end.

Nothing here makes the waiting thread or task stir before there is an answer: the watch is set
without waiting for it, and when it fires, whoever reads that sends the look by which the next
attempt decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import Incompatible
from holdfast.stores.zookeeper.client.completion import WakeSignal
from holdfast.stores.zookeeper.client.packets import Listing, Request, Sync
from holdfast.stores.zookeeper.node import ClaimNode, Presence
from holdfast.stores.zookeeper.queue import NodeQueue
from holdfast.stores.zookeeper.session import ZooKeeperSession

__all__ = ["ListingPrefetch", "PrefetchedListing", "WaitEnd"]

PREVIEW_SECONDS = 1.0
"""An older look is not worth much: it is sent again."""


class PrefetchedListing(NamedTuple):
    """A look that was sent as soon as the one in front had gone."""

    sent: float
    session: int
    listing: Listing

    def usable(self, session: ZooKeeperSession, now: float) -> bool:
        late = now - self.sent > PREVIEW_SECONDS
        return not late and self.session == session.id and self.listing.value is not None


class WaitEnd:
    """Ends a wait. From then on somebody ought to come: how long that may take counts from here,
    also where its thread or its loop is busy with something else."""

    __slots__ = ("_presence", "_wake_signal", "now")

    def __init__(
        self, presence: Presence, wake_signal: WakeSignal, now: Callable[[], float]
    ) -> None:
        self._presence, self._wake_signal, self.now = presence, wake_signal, now

    def set(self) -> None:
        self._presence.left = self.now()
        self._wake_signal.set()


class ListingPrefetch:
    """What is sent as soon as the one in front has gone, by whoever reads that. It is made before:
    then there are others to wait for."""

    __slots__ = ("_listing", "_node", "_sent", "_session", "_sync", "_wait_end")

    def __init__(
        self, session: ZooKeeperSession, node: ClaimNode, parent: str, wait_end: WaitEnd
    ) -> None:
        self._session, self._node, self._wait_end = session, node, wait_end
        self._sync, self._listing = Sync(parent), Listing(parent).then(self._listed)
        self._sent = 0.0

    def send(self) -> None:
        if not self._session.up:
            self._wait_end.set()
        elif not self._sent:
            self._sent = self._wait_end.now()
            self._session.send(self._sync, self._listing)

    def if_watch_failed(self, request: Request) -> None:
        """The watch could not be set: what it would have told has happened already."""
        if request.error is not None:
            self.send()

    def if_free(self, request: Request) -> None:
        """The first in line for slots watches all that hold, and looks whether it fits by now."""
        try:
            queue = NodeQueue(request.value or (), "")
        except Incompatible:
            self._wait_end.set()
            return
        index = queue.index(self._node.name)
        if index is None or index < queue.admitted:
            self._wait_end.set()

    def _listed(self, request: Request) -> None:
        if self._sync.error is None:  # else the listing may be an old one
            self._node.prefetched = PrefetchedListing(self._sent, self._session.id, self._listing)
        self._wait_end.set()

"""How a wait ends: a watch on the node ahead, then a listing that is fetched at once.

The waiting thread or task sleeps until the listing is there. It does not wait for the reply that
sets the watch. When the watch fires, the thread that reads the event sends the request for the
listing; the next attempt decides by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from holdfast.errors import Incompatible
from holdfast.stores.zookeeper.client.packets import Listing, Request, Sync
from holdfast.stores.zookeeper.node import ClaimNode, Presence
from holdfast.stores.zookeeper.queue import NodeQueue
from holdfast.stores.zookeeper.session import ZooKeeperSession

__all__ = ["ListingPrefetch", "PrefetchedListing", "WaitEnd", "WakeSignal"]

PREVIEW_SECONDS = 1.0
"""An older prefetched listing is not used: the attempt reads the queue again."""


class WakeSignal(Protocol):
    """Ends a wait for an event, from any thread."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...


class PrefetchedListing(NamedTuple):
    """A listing of the queue that was requested when the node ahead had gone."""

    sent: float
    session: int
    listing: Listing

    def usable(self, session: ZooKeeperSession, now: float) -> bool:
        late = now - self.sent > PREVIEW_SECONDS
        return not late and self.session == session.id and self.listing.value is not None


class WaitEnd:
    """Wakes the waiter and starts its grace period, even if its thread or event loop is busy."""

    __slots__ = ("_presence", "_wake_signal", "now")

    def __init__(
        self, presence: Presence, wake_signal: WakeSignal, now: Callable[[], float]
    ) -> None:
        self._presence, self._wake_signal, self.now = presence, wake_signal, now

    def set(self) -> None:
        self._presence.left = self.now()
        self._wake_signal.set()


class ListingPrefetch:
    """Requests the listing when the node ahead has gone, on the thread that reads the event. The
    requests are built before the wait: when the watch fires, time counts."""

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
        """Called with the reply that sets the watch. On failure the node ahead has gone already."""
        if request.error is not None:
            self.send()

    def if_admitted(self, request: Request) -> None:
        """Called with the listing that sets the watch on a whole queue, for the first waiter for
        slots. Ends the wait if the claim is admitted by now, or has no node."""
        try:
            queue = NodeQueue(request.value or (), "")
        except Incompatible:
            self._wait_end.set()
            return
        index = queue.index(self._node.name)
        if index is None or index < queue.admitted:
            self._wait_end.set()

    def _listed(self, request: Request) -> None:
        if self._sync.error is None:  # else the listing may be stale
            self._node.prefetched = PrefetchedListing(self._sent, self._session.id, self._listing)
        self._wait_end.set()

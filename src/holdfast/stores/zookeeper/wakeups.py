"""Waiting: one watch on the node in front, and the look that follows its end.

Nothing here makes the waiting thread or task stir before there is an answer: the watch is set
without waiting for it, and when it fires, whoever reads that sends the look by which the next
attempt decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import Incompatible
from holdfast.stores.zookeeper.client.calls import Wake
from holdfast.stores.zookeeper.client.packets import Ask, Listing, Sync
from holdfast.stores.zookeeper.node import Attendance, Node
from holdfast.stores.zookeeper.queue import Line
from holdfast.stores.zookeeper.session import Session

__all__ = ["Called", "Look", "Preview"]

PREVIEW_SECONDS = 1.0
"""An older look is not worth much: it is sent again."""


class Preview(NamedTuple):
    """A look that was sent as soon as the one in front had gone."""

    sent: float
    session: int
    listing: Listing

    def usable(self, session: Session, now: float) -> bool:
        late = now - self.sent > PREVIEW_SECONDS
        return not late and self.session == session.id and self.listing.value is not None


class Called:
    """Ends a wait. From then on somebody ought to come: how long that may take counts from here,
    also where its thread or its loop is busy with something else."""

    __slots__ = ("_attendance", "_wake", "now")

    def __init__(self, attendance: Attendance, wake: Wake, now: Callable[[], float]) -> None:
        self._attendance, self._wake, self.now = attendance, wake, now

    def set(self) -> None:
        self._attendance.left = self.now()
        self._wake.set()


class Look:
    """What is sent as soon as the one in front has gone, by whoever reads that. It is made before:
    then there are others to wait for."""

    __slots__ = ("_called", "_listing", "_node", "_sent", "_session", "_sync")

    def __init__(self, session: Session, node: Node, parent: str, called: Called) -> None:
        self._session, self._node, self._called = session, node, called
        self._sync, self._listing = Sync(parent), Listing(parent).then(self._answered)
        self._sent = 0.0

    def send(self) -> None:
        if not self._session.up:
            self._called.set()
        elif not self._sent:
            self._sent = self._called.now()
            self._session.send(self._sync, self._listing)

    def unless_set(self, ask: Ask) -> None:
        """The watch could not be set: what it would have told has happened already."""
        if ask.error is not None:
            self.send()

    def if_free(self, ask: Ask) -> None:
        """The first in line for slots watches all that hold, and looks whether it fits by now."""
        try:
            line = Line(ask.value or (), "")
        except Incompatible:
            self._called.set()
            return
        index = line.index(self._node.name)
        if index is None or index < line.admitted:
            self._called.set()

    def _answered(self, ask: Ask) -> None:
        if self._sync.error is None:  # else the listing may be an old one
            self._node.preview = Preview(self._sent, self._session.id, self._listing)
        self._called.set()

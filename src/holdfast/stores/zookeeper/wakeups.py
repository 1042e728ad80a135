"""Waiting: one watch on the node in front, and the look that follows its end.

Nothing here makes the waiting thread or task stir before there is an answer: the watch is set
without waiting for it, and when it fires, whoever reads that sends the look by which the next
attempt decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.claim import Busy, Claim
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.stores.zookeeper.client.calls import Wake
from holdfast.stores.zookeeper.client.packets import Ask, Listing, Read, Sync
from holdfast.stores.zookeeper.node import Attendance, Entry, Node
from holdfast.stores.zookeeper.queue import Line
from holdfast.stores.zookeeper.session import Session
from holdfast.stores.zookeeper.trips import Trips

__all__ = ["Preview", "Queueing"]

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


class Queueing(Trips):
    """The part of the backend that waits."""

    def attend(self, claim: Claim) -> tuple[Entry, Attendance]:
        """An attempt of its owner begins: somebody is there for the claim."""
        entry = self.store.entry(claim, self.runtime.now())
        entry.attendance = attendance = Attendance()
        if entry.signal is None or entry.signal.is_set():
            # Made before the first request: a nudge from here on is kept for the wait.
            entry.signal = self.wake_up()
        return entry, attendance

    def nudge(self, claim: Claim) -> None:
        entry = self.store.entries.get(claim.owner)
        if entry is not None:
            self.wake(entry)

    def wake(self, entry: Entry) -> None:
        """Ends a wait for it."""
        if entry.signal is not None:
            entry.signal.set()

    async def queue(self, claim: Claim, busy: Busy, until: float) -> Entry | None:
        """Waits where the claim stands; the entry, if it may have been woken with a look."""
        entry = self.store.entries.get(claim.owner)
        node, wake = (None, None) if entry is None else (entry.node, entry.signal)
        if entry is None or node is None or wake is None or busy.ref is None:
            pause = self.runtime.between(0.005, 0.02)
            await self.runtime.sleep(max(0.0, min(pause, until - self.runtime.now())))
            return None
        entry.attendance = attendance = Attendance()
        try:
            await self._queue(entry, node, wake, busy.ref[1], until)
        except BackendUnavailable:
            # No spinning while the store is away: the attempt that follows waits for it.
            await self.runtime.sleep(self.runtime.between(0.01, 0.05))
        finally:
            attendance.left = self.runtime.now()
        return entry

    async def _queue(
        self, entry: Entry, node: Node, wake: Wake, front: str | None, until: float
    ) -> None:
        session = await self.ready(entry.key, until)
        parent = self.store.parent(entry.claim.name)
        path = parent if front is None else f"{parent}/{front}"
        called = _Called(entry.attendance, wake, self.runtime.now)
        look = _Look(session, node, parent, called)
        session.watch(path, look.send)
        try:
            if front is not None:
                session.send(Read(path, watch=True).then(look.unless_set))
            else:
                session.send(Listing(path, watch=True).then(look.if_free))
            await self.listen(session, wake, until)
        finally:
            session.unwatch(path, look.send)


class _Called:
    """Ends a wait. From then on somebody ought to come: how long that may take counts from here,
    also where its thread or its loop is busy with something else."""

    __slots__ = ("_attendance", "_wake", "now")

    def __init__(self, attendance: Attendance, wake: Wake, now: Callable[[], float]) -> None:
        self._attendance, self._wake, self.now = attendance, wake, now

    def set(self) -> None:
        self._attendance.left = self.now()
        self._wake.set()


class _Look:
    """What is sent as soon as the one in front has gone, by whoever reads that. It is made before:
    then there are others to wait for."""

    __slots__ = ("_called", "_listing", "_node", "_sent", "_session", "_sync")

    def __init__(self, session: Session, node: Node, parent: str, called: _Called) -> None:
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

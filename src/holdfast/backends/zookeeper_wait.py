"""Waiting: one watch on the node in front, and the look that follows its end.

Nothing here makes the waiting thread or task stir before there is an answer: the watch is set
without waiting for it, and when it fires, whoever reads that sends the look by which the next
attempt decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.backends.zookeeper_line import Line
from holdfast.backends.zookeeper_store import Entry
from holdfast.backends.zookeeper_trips import Trips
from holdfast.claim import Busy, Claim
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.wires.zookeeper import Session
from holdfast.wires.zookeeper_asks import Ask, Listing, Read, Sync
from holdfast.wires.zookeeper_calls import Wake

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

    def attend(self, claim: Claim) -> Entry:
        """An attempt begins: somebody is there for the claim."""
        entry = self.store.entry(claim, self.runtime.now())
        entry.attended = None
        if entry.signal is None or entry.signal.is_set():
            # Made before the first request: a nudge from here on is kept for the wait.
            entry.signal = self.wake_up()
        return entry

    def nudge(self, claim: Claim) -> None:
        entry = self.store.entries.get(claim.owner)
        if entry is not None:
            self.wake(entry)

    def wake(self, entry: Entry) -> None:
        """Ends a wait for it."""
        if entry.signal is not None:
            entry.signal.set()

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        entry = self.store.entries.get(claim.owner)
        signal = None if entry is None else entry.signal
        if entry is None or signal is None or busy.ref is None:
            pause = self.runtime.between(0.005, 0.02)
            await self.runtime.sleep(max(0.0, min(pause, until - self.runtime.now())))
            return
        entry.attended = None
        try:
            await self._wait(entry, signal, busy.ref[1], until)
        except BackendUnavailable:
            # No spinning while the store is away: the attempt that follows waits for it.
            await self.runtime.sleep(self.runtime.between(0.01, 0.05))
        finally:
            entry.attended = self.runtime.now()

    async def _wait(self, entry: Entry, signal: Wake, front: str | None, until: float) -> None:
        session = await self.ready(entry.key, until)
        parent = self.store.parent(entry.claim.name)
        path = parent if front is None else f"{parent}/{front}"

        def woken() -> None:
            self._look_ahead(session, entry, parent, signal.set)

        session.watch(path, woken)
        try:
            if front is not None:
                session.send(Read(path, watch=True).then(_or_else(woken)))
            else:
                session.send(Listing(path, watch=True).then(_if_free(entry, signal.set)))
            await self.listen(session, signal, until)
        finally:
            session.unwatch(path, woken)

    def _look_ahead(
        self, session: Session, entry: Entry, parent: str, wake: Callable[[], None]
    ) -> None:
        """By whoever reads: sends the look, and wakes the one who waits with its answer."""
        if not session.up:
            wake()
            return
        listing = Listing(parent)
        sent = self.runtime.now()

        def answered(_: Ask) -> None:
            entry.preview = Preview(sent, session.id, listing)
            wake()

        session.send(Sync(parent), listing.then(answered))


def _or_else(woken: Callable[[], None]) -> Callable[[Any], None]:
    """The watch could not be set: what it would have told has happened already."""

    def answered(ask: Ask) -> None:
        if ask.error is not None:
            woken()

    return answered


def _if_free(entry: Entry, wake: Callable[[], None]) -> Callable[[Any], None]:
    """The first in line for slots watches all that hold, and looks whether it fits by now."""

    def answered(ask: Ask) -> None:
        try:
            line = Line(ask.value or (), "")
        except Incompatible:
            wake()
            return
        index = line.index(entry.node)
        if index is None or index < line.admitted:
            wake()

    return answered

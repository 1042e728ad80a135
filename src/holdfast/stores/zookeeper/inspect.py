"""What ZooKeeper can tell of its names: holders, waiters, and who holds next."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.claim import Holder, LockInfo, Mode, Waiter, read_label
from holdfast.core.contract import Finding, Page
from holdfast.core.ordered import shown_unreadable
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.stores.zookeeper.client.packets import Listing, Persistent, Read, Stat, Sync
from holdfast.stores.zookeeper.queue import (
    Line,
    NodeData,
    Place,
    decode_name,
    encode_name,
    read_data,
)
from holdfast.stores.zookeeper.session import USUAL_TICK_SECONDS
from holdfast.stores.zookeeper.trips import Trips

__all__ = ["Looking", "token_of"]

MOST_SHOWN = 1000
"""Of a longer line the rest is not read."""


def token_of(mode: Mode, data: NodeData, stat: Stat) -> int:
    """When it came, or when it took its slots: after that a holder's node does not change."""
    return data.token or (stat.mzxid if mode is Mode.SLOTS else stat.czxid)


class Looking(Trips):
    """The part of the backend that reads for people."""

    async def look(self, name: str) -> LockInfo:
        session = await self.looking()
        listing = Listing(self.store.parent(name))
        await self.ask(session, Sync(self.store.root), listing)
        (standing,) = await self._standings([name], [listing])
        if isinstance(standing, Incompatible):
            raise standing
        return standing

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        session = await self.looking()
        listing = Listing(self.store.lines())
        await self.ask(session, listing)
        found = sorted((decode_name(node), node) for node in listing.value or ())
        found = [each for each in found if each[0].startswith(prefix) and each[0] > (cursor or "")]
        page = found[:limit]
        names = [name for name, node in page if encode_name(name) == node]
        used = [shown_unreadable(node) for name, node in page if encode_name(name) != node]
        lists = [Listing(self.store.parent(name)) for name in names]
        if lists:
            await self.ask(session, *lists)
        for name, standing in zip(names, await self._standings(names, lists), strict=True):
            if isinstance(standing, Incompatible):
                used.append(shown_unreadable(encode_name(name), standing))
            elif standing.holders or standing.waiters:
                used.append(standing)
        return Page(used, page[-1][0] if len(found) > limit else None)

    async def _standings(
        self, names: Sequence[str], lists: Sequence[Listing]
    ) -> list[LockInfo | Incompatible]:
        """All nodes of all lines in one trip; of a name that can't be read, why."""
        lines = [self._line(name, found) for name, found in zip(names, lists, strict=True)]
        reads = [
            []
            if isinstance(line, Incompatible)
            else [Read(f"{self.store.parent(name)}/{p.node}") for p in line.places[:MOST_SHOWN]]
            for name, line in zip(names, lines, strict=True)
        ]
        if flat := [read for some in reads for read in some]:
            await self.ask(await self.looking(), *flat)
        return [
            line if isinstance(line, Incompatible) else self._read(name, line, some)
            for name, line, some in zip(names, lines, reads, strict=True)
        ]

    def _line(self, name: str, listing: Listing) -> Line | Incompatible:
        try:
            return Line(listing.value or (), self.where(name))
        except Incompatible as error:
            return error

    def _read(self, name: str, line: Line, reads: Sequence[Read]) -> LockInfo | Incompatible:
        try:
            return self._standing(name, line, reads)
        except Incompatible as error:
            return error

    def _standing(self, name: str, line: Line, reads: Sequence[Read]) -> LockInfo:
        holders: list[Holder] = []
        waiters: list[Waiter] = []
        for index, (place, read) in enumerate(zip(line.places, reads, strict=False)):
            if read.error is not None:
                continue  # it left meanwhile
            data, stat = read_data(read.value[0], self.where(name)), read.value[1]
            label = read_label(data.label)
            slots_missing = place.mode is Mode.SLOTS and not data.slots
            if index < line.admitted and not slots_missing:
                holders.append(self._holder(label, place, data, stat))
            else:
                waiters.append(Waiter(*label, place.mode, stat.ctime / 1000, data.behind))
        limit = line.places[0].limit if line.places else 0
        return LockInfo(name, limit, tuple(holders), tuple(waiters))

    def _holder(
        self, label: tuple[str, int, str, str], place: Place, data: NodeData, stat: Stat
    ) -> Holder:
        since = stat.mtime if place.mode is Mode.SLOTS else stat.ctime
        token = token_of(place.mode, data, stat)
        # The ensemble does not tell when it last heard of a session: this is the most.
        return Holder(*label, place.mode, token, data.slots, since / 1000, float(data.ttl))

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        parent = self.store.parent(name)
        signal = self.wake_up()
        try:
            session = await self.looking()
            session.watch(parent, signal.set)
            try:
                if await self._highest(name) == seen:
                    listing = Listing(parent, watch=True)
                    await self.ask(session, listing, until=until)
                    # A name that nobody uses has no node to watch.
                    wake = until if listing.error is None else self.runtime.now() + 1.0
                    if listing.error is not None or await self._highest(name) == seen:
                        await self.listen(session, signal, min(until, wake))
            finally:
                session.unwatch(parent, signal.set)
        except BackendUnavailable:
            pause = self.runtime.between(0.1, 0.5)
            await self.runtime.sleep(max(0.0, min(pause, until - self.runtime.now())))

    async def _highest(self, name: str) -> int | None:
        standing = await self.look(name)
        return max((holder.token for holder in standing.holders), default=None)

    def _tick(self, floor: float) -> Finding:
        """What the certain time of holds rests on: servers tell each other every half tick of whom
        they have heard, and don't tell how long a tick is."""
        told = self.store.options.tick
        if told is not None:
            return Finding("tick", f"{max(told, floor / 2):g} s, as the URL says")
        if floor >= 2 * USUAL_TICK_SECONDS:
            words = f"taken to be {floor / 2:g} s, half of the shortest session"
            return Finding("tick", f"{words}; if minSessionTimeout is set, name it: ?tick=SECONDS")
        words = f"taken to be {USUAL_TICK_SECONDS:g} s: the shortest session of {floor:g} s does "
        more = "not tell it. Name it, so that a dead holder is replaced sooner: ?tick=SECONDS"
        return Finding("tick", words + more)

    async def probe(self) -> list[Finding]:
        session = await self.ready(0)
        await self.make(session, self.store.lines(), Persistent)
        floor = session.floor or 0.0
        findings = [
            Finding("connection", f"{self.store.display} answers, and lets us write"),
            Finding("sessions", f"the shortest ttl is {max(1.0, floor):g} s"),
            self._tick(floor),
        ]
        if len(self.store.options.hosts.split(",")) < 3:
            detail = "fewer than three servers are named: losing one may stop everything"
            findings.append(Finding("ensemble", detail, "warning"))
        if not self.store.options.client:
            detail = "nodes are open to everybody who reaches the servers"
            findings.append(Finding("access", detail, "warning"))
        return findings

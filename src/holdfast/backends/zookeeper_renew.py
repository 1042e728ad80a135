"""Keeping holds and places: a batch is one write through the majority, per session."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.backends.zookeeper_line import write_data
from holdfast.backends.zookeeper_store import Entry
from holdfast.backends.zookeeper_trips import Trips
from holdfast.claim import Grant
from holdfast.core.contract import Renewal, Waiting
from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.wires.zookeeper import Session
from holdfast.wires.zookeeper_asks import Ask, Check, Exists, Multi, Write

__all__ = ["Renewing"]

BATCH = 1000
TRIES = 4
GONE = "its node is gone: it ran out or was broken"
ENDED = "its ZooKeeper session has ended"


class _Batch:
    """What one session has to keep."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.waits: list[Waiting] = []


class Renewing(Trips):
    """The part of the backend that the keeper calls."""

    async def renew(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], *, until: float
    ) -> Renewal:
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        forgotten: set[str] = set()
        starts: list[float] = []
        batches = self._sort(grants, waits, lost, forgotten)
        # Sessions that answer come first: one that is away must not make the others late.
        for key in sorted(batches, key=lambda key: not self.store.session(key).up):
            batch = batches[key]
            try:
                session = await self.ready(key, until)
                starts.append(await self._renew(session, batch, lost, forgotten, until))
            except BackendUnavailable as error:
                unknown |= {grant.claim.owner: str(error) for grant in batch.grants}
        since = min(starts, default=None)
        return Renewal(lost, unknown, frozenset(forgotten), since)

    def _sort(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        lost: dict[str, str],
        forgotten: set[str],
    ) -> dict[int, _Batch]:
        """By session; what is known to be gone is told without asking."""
        batches: dict[int, _Batch] = {}
        for grant in grants:
            key, number, _ = grant.ref
            if grant.claim.ttl > key:
                raise Unsupported(
                    f"{self.where(grant.claim.name)} was taken with a ttl of {key} s; "
                    "ZooKeeper can't keep it for longer than that"
                )
            session = self.store.sessions.get(key)
            if session is None or session.id != number:
                lost[grant.claim.owner] = ENDED
            elif grant.claim.owner not in self.store.entries:
                lost[grant.claim.owner] = GONE
            else:
                batches.setdefault(key, _Batch()).grants.append(grant)
        for waiting in waits:
            entry = self.store.entries.get(waiting.claim.owner)
            if entry is None or not entry.path:
                forgotten.add(waiting.claim.owner)
            else:
                batches.setdefault(entry.key, _Batch()).waits.append(waiting)
        return batches

    async def _renew(
        self,
        session: Session,
        batch: _Batch,
        lost: dict[str, str],
        forgotten: set[str],
        until: float,
    ) -> float:
        """One write proves that all nodes are there; answers since when that is certain."""
        paths: dict[str, str] = {}
        for grant in batch.grants:
            paths[grant.ref[2]] = grant.claim.owner
        for waiting in batch.waits:
            entry = self.store.entries.get(waiting.claim.owner)
            if entry is not None:
                paths[entry.path] = waiting.claim.owner
        sent = self.runtime.now()
        gone = {paths[path] for path in await self._missing(session, list(paths), until)}
        since = session.since(sent)
        for grant in batch.grants:
            owner = grant.claim.owner
            entry = self.store.entries.get(owner)
            if session.id != grant.ref[1]:
                lost[owner] = ENDED
            elif owner in gone or entry is None or not entry.kept(since + grant.claim.ttl):
                lost[owner] = GONE
                self.store.entries.pop(owner, None)
            elif self.store.entries.get(owner) is not entry:
                lost[owner] = GONE  # given up in the same moment
        await self._refresh(session, batch.waits, gone, forgotten, until)
        return since

    async def _missing(self, session: Session, paths: list[str], until: float) -> list[str]:
        """The nodes that are gone; all others are there by the word of a majority."""
        gone: list[str] = []
        for start in range(0, len(paths), BATCH):
            some = paths[start : start + BATCH]
            for _ in range(TRIES):
                check = Multi([Check(path) for path in some])
                await self.ask(session, check, until=until)
                if not check.failed:
                    break
                # It tells the first only: a look tells all, and what is left is proven anew.
                looks = [Exists(path) for path in some]
                await self.ask(session, *looks, until=until)
                there = {p for p, look in zip(some, looks, strict=True) if look.value is not None}
                gone += [path for path in some if path not in there]
                some = [path for path in some if path in there]
                if not some:
                    break
            else:
                raise BackendUnavailable(f"{self.store.display}: too much changes to be renewed")
        return gone

    async def _refresh(
        self,
        session: Session,
        waits: Sequence[Waiting],
        gone: set[str],
        forgotten: set[str],
        until: float,
    ) -> None:
        writes: list[Ask] = []
        for claim, behind in waits:
            entry = self.store.entries.get(claim.owner)
            if entry is None or claim.owner in gone or entry.session != session.id:
                forgotten.add(claim.owner)
                continue
            entry.refreshed = self.runtime.now()
            if entry.behind != behind and entry.grant is None and not entry.taking:
                # It wakes the one behind for nothing: only when there is something to tell.
                entry.behind = behind
                writes.append(self._told(entry, behind))
        if writes:
            await self.ask(session, *writes, until=until)

    def _told(self, entry: Entry, behind: int) -> Write:
        return Write(entry.path, write_data(entry.key, behind, (), entry.claim.label))

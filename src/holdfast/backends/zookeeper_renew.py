"""Keeping holds and places: a batch is one write through the majority, per session."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.backends.zookeeper_line import NodeData, write_data
from holdfast.backends.zookeeper_move import ENDED, Moving
from holdfast.backends.zookeeper_store import Entry
from holdfast.claim import Grant
from holdfast.core.contract import Renewal, Waiting
from holdfast.errors import BackendUnavailable
from holdfast.wires.zookeeper import NEVER, Session
from holdfast.wires.zookeeper_asks import Check, Exists, Multi, Write
from holdfast.wires.zookeeper_calls import Call

__all__ = ["Renewing"]

BATCH = 1000
TRIES = 4
GONE = "its node is gone: it ran out or was broken"


class _Batch:
    """What one session has to keep, and the request that keeps it."""

    def __init__(self, key: int, session: Session) -> None:
        self.key, self.session = key, session
        self.grants: list[tuple[Grant, Entry]] = []
        self.waits: list[tuple[Waiting, Entry]] = []
        self.sent = 0.0
        self.number = 0
        self.check: Multi | None = None
        self.call: Call | None = None

    def paths(self) -> list[str]:
        held = [entry.path for _, entry in self.grants]
        return held + [entry.path for _, entry in self.waits]


class _Answer:
    """What becomes of the whole batch of a door."""

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.starts: list[float] = []

    def renewal(self) -> Renewal:
        since = min(self.starts, default=None)
        return Renewal(self.lost, self.unknown, frozenset(self.forgotten), since)


class Renewing(Moving):
    """The part of the backend that the keeper calls."""

    async def renew(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], *, until: float
    ) -> Renewal:
        answer = _Answer()
        batches = await self._sort(grants, waits, answer, until)
        # To all sessions at once: one that is away must not make the others late.
        for batch in batches:
            if batch.session.up:
                self._start(batch)
        for batch in batches:
            try:
                await self._renew(batch, answer, until)
            except BackendUnavailable as error:
                answer.unknown |= {grant.claim.owner: str(error) for grant, _ in batch.grants}
        return answer.renewal()

    async def _sort(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], answer: _Answer, until: float
    ) -> list[_Batch]:
        """By session; what is known to be gone is told without asking."""
        batches: dict[int, _Batch] = {}
        for grant in grants:
            entry = await self._placed(grant, answer, until)
            if entry is not None:
                self._batch(batches, entry).grants.append((grant, entry))
        for waiting in waits:
            found = self.store.entries.get(waiting.claim.owner)
            if found is None or not found.path:
                answer.forgotten.add(waiting.claim.owner)
            else:
                self._batch(batches, found).waits.append((waiting, found))
        return list(batches.values())

    def _batch(self, batches: dict[int, _Batch], entry: Entry) -> _Batch:
        if entry.key not in batches:
            batches[entry.key] = _Batch(entry.key, self.store.session(entry.key))
        return batches[entry.key]

    async def _placed(self, grant: Grant, answer: _Answer, until: float) -> Entry | None:
        """The hold's entry, on a session that lasts long enough for its ttl."""
        owner = grant.claim.owner
        entry = self.store.entries.get(owner)
        if entry is None or entry.grant is None:
            answer.lost[owner] = GONE
            return None
        try:
            if entry.moving:
                await self.find_session(entry, until)
            if grant.claim.ttl > entry.key:
                await self.move(entry, grant.claim, until)
        except BackendUnavailable as error:
            answer.unknown[owner] = str(error)
            return None
        session = self.store.sessions.get(entry.key)
        if session is None or session.id != entry.session:
            answer.lost[owner] = ENDED
            self.store.entries.pop(owner, None)
            return None
        return entry

    def _start(self, batch: _Batch) -> None:
        paths = batch.paths()[:BATCH]
        batch.sent, batch.number = self.runtime.now(), batch.session.id
        batch.call = self._call()
        batch.check = Multi([Check(path) for path in paths])
        batch.session.start(batch.call, batch.check)

    async def _renew(self, batch: _Batch, answer: _Answer, until: float) -> None:
        """One write proves that all nodes are there."""
        session = batch.session
        if batch.check is None:
            await self.ready(
                batch.grants[0][1].key if batch.grants else batch.waits[0][1].key, until
            )
            self._start(batch)
        assert batch.call is not None
        assert batch.check is not None
        await session.finish(batch.call, self.seconds(until), batch.check)
        paths = batch.paths()
        gone = set()
        if batch.check.failed:
            gone |= await self._missing(session, paths[:BATCH], until)
        for start in range(BATCH, len(paths), BATCH):
            gone |= await self._missing(session, paths[start : start + BATCH], until)
        since = session.since(batch.sent, batch.number)
        if since != NEVER:
            answer.starts.append(since)
        for grant, entry in batch.grants:
            self._keep(session, grant, entry, since, gone, answer)
        await self._refresh(session, batch.waits, gone, answer.forgotten, until)

    def _keep(
        self,
        session: Session,
        grant: Grant,
        entry: Entry,
        since: float,
        gone: set[str],
        answer: _Answer,
    ) -> None:
        owner = grant.claim.owner
        entry.ends = since + grant.claim.ttl
        if since == NEVER or session.id != entry.session:
            answer.lost[owner] = ENDED
        elif entry.path in gone or self.store.entries.get(owner) is not entry:
            answer.lost[owner] = GONE  # the latter: given up in this moment
        else:
            return
        self.store.entries.pop(owner, None)

    async def _missing(self, session: Session, paths: list[str], until: float) -> set[str]:
        """The nodes that are gone; all others are there by the word of a majority."""
        gone: set[str] = set()
        for _ in range(TRIES):
            # A failed check tells the first only: a look tells all, the rest is proven anew.
            looks = [Exists(path) for path in paths]
            await self.ask(session, *looks, until=until)
            there = [
                path for path, look in zip(paths, looks, strict=True) if look.value is not None
            ]
            gone |= set(paths) - set(there)
            check = Multi([Check(path) for path in there])
            if there:
                await self.ask(session, check, until=until)
            if not there or not check.failed:
                return gone
            paths = there
        raise BackendUnavailable(f"{self.store.display}: too much changes to be renewed")

    async def _refresh(
        self,
        session: Session,
        waits: Sequence[tuple[Waiting, Entry]],
        gone: set[str],
        forgotten: set[str],
        until: float,
    ) -> None:
        told: list[tuple[Entry, Write]] = []
        for (claim, behind), entry in waits:
            standing = self.store.entries.get(claim.owner) is entry
            if not standing or entry.path in gone or entry.session != session.id:
                forgotten.add(claim.owner)
                continue
            entry.refreshed = self.runtime.now()
            if entry.behind != behind and entry.grant is None and not entry.taking:
                # It wakes the one behind for nothing: only when there is something to tell.
                entry.behind = behind
                data = write_data(NodeData(entry.key, behind, (), 0, claim.label))
                told.append((entry, Write(entry.path, data)))
        if told:
            await self.ask(session, *(write for _, write in told), until=until)
        for entry, write in told:
            if write.error is None:
                entry.version = write.value.version

"""Keeping holds and places: one trip per session, in writes through the majority."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.claim import Grant, Mode
from holdfast.core.contract import Renewal, Waiting
from holdfast.errors import BackendUnavailable
from holdfast.stores.zookeeper.client.calls import Call
from holdfast.stores.zookeeper.client.packets import ANY_VERSION, Checks, Exists, Write
from holdfast.stores.zookeeper.extend import ENDED, Moving
from holdfast.stores.zookeeper.node import Entry, Node
from holdfast.stores.zookeeper.queue import NodeData, write_data
from holdfast.stores.zookeeper.session import NEVER, Session

__all__ = ["Renewing"]

BATCH = 1000
BATCH_LETTERS = 200_000
"""Servers take no request of a megabyte, and names may be long."""
GONE = "its node is gone: it ran out or was broken"


class _Batch:
    """What one session has to keep, and the request that keeps it."""

    def __init__(self, key: int, session: Session) -> None:
        self.key, self.session = key, session
        self.grants: list[Grant] = []
        self.held: list[Node] = []
        """The nodes of the grants, one by one: not in pairs, since there may be many."""
        self.waits: list[tuple[Waiting, Entry, Node]] = []
        self.sent = 0.0
        self.number = 0
        self.checks: list[tuple[list[str], Checks]] = []
        """What was asked for in one go: the nodes, and the write that proves them."""
        self.call: Call | None = None

    def paths(self) -> list[str]:
        held = [node.path for node in self.held]
        return held + [node.path for _, _, node in self.waits]


def _portions(paths: Sequence[str]) -> Iterator[list[str]]:
    """As much as goes into one request."""
    portion: list[str] = []
    letters = 0
    for path in paths:
        if len(portion) == BATCH or letters > BATCH_LETTERS:
            yield portion
            portion, letters = [], 0
        portion.append(path)
        letters += len(path)
    yield portion


class _Answer:
    """What becomes of the whole batch of a client."""

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.starts: list[float] = []

    def renewal(self) -> Renewal:
        since = min(self.starts, default=None)
        return Renewal(self.lost, self.unknown, frozenset(self.forgotten), since)


class Renewing(Moving):
    """The part of the backend that the renewer calls."""

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
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
                answer.unknown |= {grant.claim.owner: str(error) for grant in batch.grants}
        return answer.renewal()

    async def _sort(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], answer: _Answer, until: float
    ) -> list[_Batch]:
        """By session; what is known to be gone is told without asking."""
        batches: dict[int, _Batch] = {}
        for grant in grants:
            entry = await self._placed(grant, answer, until)
            if entry is not None and entry.node is not None:
                batch = self._batch(batches, entry)
                batch.grants.append(grant)
                batch.held.append(entry.node)
        for waiting in waits:
            found = self.store.entries.get(waiting.claim.owner)
            node = None if found is None else found.node
            if found is None or node is None or node.over:
                answer.forgotten.add(waiting.claim.owner)
            else:
                self._batch(batches, found).waits.append((waiting, found, node))
        return list(batches.values())

    def _batch(self, batches: dict[int, _Batch], entry: Entry) -> _Batch:
        if entry.key not in batches:
            batches[entry.key] = _Batch(entry.key, self.store.session(entry.key))
        return batches[entry.key]

    async def _placed(self, grant: Grant, answer: _Answer, until: float) -> Entry | None:
        """The hold's entry, on a session that lasts long enough for its ttl."""
        owner = grant.claim.owner
        entry = self.store.entries.get(owner)
        node = None if entry is None else entry.node
        if entry is None or node is None or node.grant is None:
            answer.lost[owner] = GONE
            return None
        try:
            if node.moving:
                await self.find_session(entry, node, until)
            if grant.claim.ttl > entry.key:
                await self.move(entry, node, grant, until)
        except BackendUnavailable as error:
            answer.unknown[owner] = str(error)
            return None
        session = self.store.sessions.get(entry.key)
        if session is None or session.id != node.session:
            answer.lost[owner] = ENDED
            node.end()
            self.store.entries.pop(owner, None)
            return None
        return entry

    def _start(self, batch: _Batch) -> None:
        batch.sent, batch.number = self.runtime.now(), batch.session.id
        batch.call = self._call()
        batch.checks = [(paths, Checks(paths)) for paths in _portions(batch.paths())]
        batch.session.start(batch.call, *(check for _, check in batch.checks))

    async def _renew(self, batch: _Batch, answer: _Answer, until: float) -> None:
        """A write proves that all its nodes are there."""
        session = batch.session
        if batch.call is None:
            await self.ready(batch.key, until)
            self._start(batch)
        assert batch.call is not None
        checks = [check for _, check in batch.checks]
        await session.finish(batch.call, self.seconds(until), *checks)
        gone: set[str] = set()
        for paths, check in batch.checks:
            if check.failed:
                gone |= await self._missing(session, paths, until)
        since = session.since(batch.sent, batch.number)
        if since != NEVER:
            answer.starts.append(since)
        for grant, node in zip(batch.grants, batch.held, strict=True):
            self._keep(session, grant, node, since, gone, answer)
        await self._refresh(session, batch.waits, gone, answer.forgotten, until)

    def _keep(
        self,
        session: Session,
        grant: Grant,
        node: Node,
        since: float,
        gone: set[str],
        answer: _Answer,
    ) -> None:
        owner = grant.claim.owner
        if since == NEVER or session.id != node.session:
            answer.lost[owner] = ENDED
        elif node.path in gone or not node.hold(grant, since + grant.claim.ttl):
            answer.lost[owner] = GONE  # the latter: given up in this moment
        else:
            return
        node.end()
        self.store.entries.pop(owner, None)

    async def _missing(self, session: Session, paths: list[str], until: float) -> set[str]:
        """The nodes that are gone. Those that a look finds are there by the word of the majority
        that the failed check has gone through: the look comes behind it."""
        # The check tells the first only. It is not tried again without those that are gone:
        # while many are released, there would always be one more.
        looks = [Exists(path) for path in paths]
        await self.ask(session, *looks, until=until)
        return {path for path, look in zip(paths, looks, strict=True) if look.value is None}

    async def _refresh(
        self,
        session: Session,
        waits: Sequence[tuple[Waiting, Entry, Node]],
        gone: set[str],
        forgotten: set[str],
        until: float,
    ) -> None:
        told: list[tuple[Node, Write]] = []
        for (claim, behind), entry, node in waits:
            if node.over or node.path in gone or node.session != session.id:
                forgotten.add(claim.owner)
                continue
            entry.refreshed = self.runtime.now()
            if entry.behind != behind and node.grant is None and not entry.maker:
                # It wakes the one behind for nothing: only when there is something to tell.
                entry.behind = behind
                data = write_data(NodeData(entry.key, behind, (), 0, claim.label))
                # By the time that it is written it may say which slots the claim has taken.
                version = node.version if claim.mode is Mode.SLOTS else ANY_VERSION
                told.append((node, Write(node.path, data, version)))
        if told:
            await self.ask(session, *(write for _, write in told), until=until)
        for node, write in told:
            if write.error is None:
                node.version = write.value.version

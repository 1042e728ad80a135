"""``zookeeper://h1,h2,h3/path``: a line of ephemeral nodes per name, one session per ttl.

Taking a free name is one trip: the create of the own node and the listing of the line go out
back to back. The token is the zxid of the create (of the slots, for slots): it is the
ensemble's own order. Who waits watches the node in front of it. See ``zookeeper_line`` for what
is stored and ``wires.zookeeper`` for what makes a hold certain.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import QUEUE_CAP, Runtime, Settings
from holdfast.errors import BackendUnavailable, Incompatible, LimitMismatch, Unsupported
from holdfast.stores.zookeeper.client.packets import (
    Ask,
    Check,
    Create,
    Delete,
    Ephemeral,
    Listing,
    Multi,
    Read,
    Sync,
    Write,
)
from holdfast.stores.zookeeper.inspect import Looking, token_of
from holdfast.stores.zookeeper.node import Entry, Node
from holdfast.stores.zookeeper.queue import (
    SEQUENCE_LIMIT,
    Line,
    NodeData,
    digest,
    entry_prefix,
    front_of,
    read_data,
    slot_name,
    write_data,
)
from holdfast.stores.zookeeper.records import Recording
from holdfast.stores.zookeeper.release import Ending, was_ours
from holdfast.stores.zookeeper.renew import Renewing
from holdfast.stores.zookeeper.session import NEVER, Session
from holdfast.stores.zookeeper.store import ZooKeeperStore
from holdfast.stores.zookeeper.url import read_options
from holdfast.stores.zookeeper.wakeups import Queueing
from holdfast.url import Url

__all__ = ["ZooKeeperBackend", "open_store"]

TRIES = 8
MOMENT_SECONDS = 0.01
"""For another thread of this client that is at the same claim."""
Answer = TypeVar("Answer", Grant | Busy, Grant | Busy | None)
_SEQUENCE_LIMIT = f"{SEQUENCE_LIMIT:010}"
GONE_NAME = "the name's node vanished again and again"


class Attempt(NamedTuple):
    """One attempt at a claim, as it goes from trip to trip."""

    session: Session
    entry: Entry
    join: bool
    until: float | None
    """By when the store must have answered; ``None``: in the time that every trip has."""
    anew: bool = True
    """Whether to line up anew if its place is gone."""


class ZooKeeperBackend(Queueing, Ending, Renewing, Looking, Recording):
    """Admits claims in lines of nodes; its other parts keep, show and record."""

    def __init__(self, store: ZooKeeperStore, runtime: Runtime) -> None:
        super().__init__(store, runtime)
        self._closed = False

    # Taking

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        entry, attendance = self.attend(claim)
        try:
            session = await self.ready(entry.key, until)
            answer = await self._attempt(Attempt(session, entry, join, until))
            if not join and type(answer) is Busy:
                self.store.entries.pop(claim.owner, None)
            return answer
        except (LimitMismatch, Incompatible, Unsupported):
            if entry.node is None or entry.node.over:
                self.store.entries.pop(claim.owner, None)
            raise
        finally:
            attendance.left = self.runtime.now()

    async def _attempt(self, at: Attempt, *before: Ask) -> Grant | Busy:
        entry, node = at.entry, at.entry.node
        if node is not None and node.session == at.session.id and not node.over:
            answer = await self._stand(at, node, *before)
            if answer is not None:
                return answer
        elif before:
            await self.ask(at.session, *before)
        if at.anew:
            return await self._alone(at, lambda: self._enter(at, node))
        self.wake(entry)
        return Busy(0)

    async def _alone(self, at: Attempt, work: Callable[[], Awaitable[Answer]]) -> Answer | Busy:
        """What one attempt at a claim does at a time: to make its node, or to take its slots."""
        maker = at.entry.maker
        if maker.get(0) is at:
            return await work()
        try:
            if maker.setdefault(0, at) is not at:
                return Busy(0, MOMENT_SECONDS)
            return await work()
        finally:
            if maker.get(0) is at:
                maker.clear()

    async def _enter(self, at: Attempt, gone: Node | None) -> Grant | Busy:
        """Makes a node and decides by the line that it finds itself in."""
        session, entry, until = at.session, at.entry, at.until
        claim = entry.claim
        known = self.store.entries.setdefault(claim.owner, entry)
        if known is not entry or entry.node is not gone:
            return Busy(0, MOMENT_SECONDS)  # another thread has just made one
        self._leave_behind(entry, gone)
        self.store.debts.forgive(claim.owner)
        if entry.asked:
            found = entry.node = await self._find(at)
            answer = None if found is None else await self._stand(at, found)
            if answer is not None:
                return answer
            self._leave_behind(entry, found)
        parent = self.store.parent(claim.name)
        prefix = f"{parent}/{entry_prefix(claim)}"
        data = write_data(NodeData(entry.key, 0, (), 0, claim.label))
        for _ in range(TRIES):
            create, listing = Create(prefix, data, self.store.acl), Listing(parent)
            sent = self.runtime.now()
            entry.asked = True
            await self.ask(session, create, listing, until=until)
            entry.asked = False
            if create.error is None:
                path, stat = create.value
                node = entry.node = Node(path, stat.ephemeral_owner, stat.czxid)
                session.clock = stat.ctime / 1000, sent
                since = session.since(sent, node.session)
                if since == NEVER:
                    raise BackendUnavailable(f"{self.store.display}: the session has just ended")
                answer = await self._decide(at, node, listing.value, since)
                if answer is not None:
                    return answer
                self._leave_behind(entry, node)
            await self.make(session, parent, until=until)
        raise BackendUnavailable(f"{self.store.display}: {GONE_NAME}: {claim.name!r}")

    def _leave_behind(self, entry: Entry, gone: Node | None) -> None:
        if gone is not None:
            gone.end()
            entry.past |= {gone.path}

    async def _stand(self, at: Attempt, node: Node, *before: Ask) -> Grant | Busy | None:
        """Looks again from the place that it has; ``None`` if it has none any more."""
        session, entry, until = at.session, at.entry, at.until
        parent = self.store.parent(entry.claim.name)
        sent = self.runtime.now()
        # A recent proof is enough for a grant; an old one is renewed in the same trip.
        fresh = sent - session.proven < entry.key / 6 and node.grant is None
        preview, node.preview = node.preview, None
        if preview is not None and fresh and not before and preview.usable(session, sent):
            since = session.proven_since(node.session)
            return await self._decide(at, node, preview.listing.value, since)
        first: Ask = Sync(parent) if fresh else Multi([Check(node.path)])
        listing = Listing(parent)
        await self.ask(session, *before, first, listing, until=until)
        if listing.error is not None or (isinstance(first, Multi) and first.failed):
            return None
        number = node.session
        since = session.proven_since(number) if fresh else session.since(sent, number)
        return await self._decide(at, node, listing.value, since)

    async def _find(self, at: Attempt) -> Node | None:
        """A create was not answered: the node that it may have made in this session."""
        session, entry, until = at.session, at.entry, at.until
        entry.unsure = True
        parent = self.store.parent(entry.claim.name)
        listing = Listing(parent)
        await self.ask(session, Sync(parent), listing, until=until)
        if listing.error is not None:
            return None
        line = Line(listing.value, self.where(entry.claim.name))
        reads = [Read(f"{parent}/{p.node}") for p in line.of_owner(digest(entry.claim.owner))]
        if reads:
            await self.ask(session, *reads, until=until)
        for read in reads:
            known = read.path in entry.past
            if not known and read.error is None and read.value[1].ephemeral_owner == session.id:
                return Node(read.path, session.id, read.value[1].czxid)
        return None

    # Deciding

    async def _decide(
        self, at: Attempt, node: Node, nodes: list[str], since: float
    ) -> Grant | Busy | None:
        entry = at.entry
        if since == NEVER or node.over:
            return None  # its session has ended, or nobody had come for it in time
        front = front_of(node.name, nodes) if entry.claim.mode is Mode.EXCLUSIVE else None
        if front is None:
            return await self._decide_by_line(at, node, nodes, since)
        if not front:
            return self._grant(entry, node, node.token, (), since)
        if at.join and len(front) <= QUEUE_CAP and node.name[-10:] < _SEQUENCE_LIMIT:
            return Busy(len(front) - 1, ref=(entry.key, front[-1]))
        return await self._decide_by_line(at, node, nodes, since)

    async def _decide_by_line(
        self, at: Attempt, node: Node, nodes: list[str], since: float
    ) -> Grant | Busy | None:
        entry = at.entry
        try:
            line = Line(nodes, self.where(entry.claim.name))
            index = line.index(node.name)
            if index is None:
                return None
            line.check(entry.claim, index, self.store.display)
        except BaseException:
            await self._withdraw(at, node)
            raise
        # Nodes that an unanswered create has left: another that stands comes after this one's end.
        doubles = line.others_of(digest(entry.claim.owner), node.name)
        if doubles:
            await self._drop(at, doubles)
        if index < line.admitted:
            if entry.claim.mode is Mode.SLOTS:
                return await self._alone(at, lambda: self._take_slots(at, node, line, since))
            return self._grant(entry, node, node.token, (), since)
        return await self._busy(at, node, line, index)

    async def _drop(self, at: Attempt, doubles: Sequence[str]) -> None:
        parent = self.store.parent(at.entry.claim.name)
        await self.ask(
            at.session, *(Delete(f"{parent}/{node}") for node in doubles), until=at.until
        )

    def _grant(
        self, entry: Entry, node: Node, token: int, slots: tuple[int, ...], since: float
    ) -> Grant | None:
        """Lets it in, unless its node was given up in this moment."""
        ref = (entry.key, node.session, node.path)
        grant = Grant(entry.claim, token, slots, since, ref)
        return grant if node.hold(grant, since + entry.claim.ttl) else None

    async def _take_slots(
        self, at: Attempt, node: Node, line: Line, since: float
    ) -> Grant | Busy | None:
        """Takes the lowest free slots. The zxid of that is the token: per slot it only grows."""
        session, entry, until = at.session, at.entry, at.until
        grant = node.grant
        if grant is not None:
            return self._grant(entry, node, grant.token, grant.slots, since)
        for _ in range(TRIES):
            grant = await self._try_slots(at, node, line)
            if grant is not None or node.over:
                return grant
            read, listing = Read(node.path), Listing(self.store.parent(entry.claim.name))
            await self.ask(session, read, listing, until=until)
            if read.error is not None or listing.error is not None:
                return None
            data = read_data(read.value[0], self.where(entry.claim.name))
            stat = read.value[1]
            if data.slots:  # an earlier try was not answered, but done
                token = token_of(Mode.SLOTS, data, stat)
                return self._grant(entry, node, token, data.slots, since)
            node.version = stat.version
            line = Line(listing.value, self.where(entry.claim.name))
        return Busy(0, 0.05)

    async def _try_slots(self, at: Attempt, node: Node, line: Line) -> Grant | None:
        session, entry, until = at.session, at.entry, at.until
        slots = line.free_slots(entry.claim.weight, entry.claim.limit)
        if len(slots) < entry.claim.weight:
            return None
        parent, acl = self.store.parent(entry.claim.name), self.store.acl
        data = write_data(NodeData(entry.key, 0, slots, 0, entry.claim.label))
        parts = [Ephemeral(f"{parent}/{slot_name(slot)}", b"", acl) for slot in slots]
        # With its version, so that of two tries of which one was not answered one is done.
        multi = Multi([Write(node.path, data, node.version), *parts])
        sent = self.runtime.now()
        await self.ask(session, multi, until=until)
        if multi.failed:
            return None
        since = session.since(sent, node.session)
        return self._grant(entry, node, multi.value[0].mzxid, slots, since)

    async def _busy(self, at: Attempt, node: Node, line: Line, index: int) -> Busy:
        entry = at.entry
        place = index - line.admitted
        if not at.join:
            await self._withdraw(at, node)
            return Busy(place)
        if place >= QUEUE_CAP:
            await self._withdraw(at, node)
            return Busy(place, 1.0, reason=f"{QUEUE_CAP} already wait for {entry.claim.name!r}")
        if not 0 <= line.sequence(index) < SEQUENCE_LIMIT:
            await self._withdraw(at, node)
            reason = f"the line of {entry.claim.name!r} starts over"
            return Busy(place, self.runtime.between(0.05, 0.2), reason=reason)
        return Busy(place, ref=(entry.key, line.before(index)))

    async def _withdraw(self, at: Attempt, node: Node) -> None:
        if node.end():
            await self.ask(at.session, Delete(node.path), until=at.until)

    # Waiting

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        began = self.runtime.now()
        entry = await self.queue(claim, busy, until)
        node = None if entry is None else entry.node
        session = None if entry is None else self.store.sessions.get(entry.key)
        if entry is None or node is None or node.preview is None or session is None:
            return None
        # What the look has found is what an attempt would find. A wait that has lasted leaves it
        # to one: certain time would count from before the wait.
        now, brief, preview = self.runtime.now(), entry.key / 6, node.preview
        if now - began > brief or now - session.proven > brief or node.grant is not None:
            return None
        since = session.proven_since(node.session)
        first = claim.mode is Mode.EXCLUSIVE and preview.usable(session, now)
        if since == NEVER or not first or front_of(node.name, preview.listing.value) != []:
            return None
        node.preview = None
        return self._grant(entry, node, node.token, (), since)

    # Ending

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        key, ending = self.ending(grant)
        # One that is known may have been served meanwhile by its own thread, and have released
        # it: nobody would come for another place. If it still waits, it lines up itself.
        known = self.store.entries.get(claim.owner)
        entry = known or self.store.entry(claim, self.runtime.now())
        session, before = await self.ready(key), ending
        if entry.key != key:
            if ending:
                await self.ask(session, *ending)
            session, before = await self.ready(entry.key), []
        answer = await self._attempt(Attempt(session, entry, True, None, known is None), *before)
        return bool(ending) and was_ours(ending[0]), answer

    # The end

    def forget(self) -> None:
        self.store.forget()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.say_goodbye(self.store.leave(self))


def open_store(url: Url, settings: Settings) -> ZooKeeperStore:
    """``zookeeper://[user:password@]host[:port][,host…][/path][?options]``."""
    options = read_options(url, settings)
    return ZooKeeperStore(options, url.path.rstrip("/"), settings)

"""``zookeeper://h1,h2,h3/path``: a line of ephemeral nodes per name, one session per ttl.

Taking a free name is one trip: the create of the own node and the listing of the line go out
back to back. The token is the zxid of the create (of the slots, for slots): it is the
ensemble's own order. Who waits watches the node in front of it. See ``zookeeper_line`` for what
is stored and ``wires.zookeeper`` for what makes a hold certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.backends.zookeeper_end import Ending, was_ours
from holdfast.backends.zookeeper_line import (
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
from holdfast.backends.zookeeper_look import Looking, token_of
from holdfast.backends.zookeeper_records import Recording
from holdfast.backends.zookeeper_renew import Renewing
from holdfast.backends.zookeeper_store import Entry, ZooKeeperStore
from holdfast.backends.zookeeper_url import read_options
from holdfast.backends.zookeeper_wait import Queueing
from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import QUEUE_CAP, Runtime, Settings
from holdfast.errors import BackendUnavailable
from holdfast.url import Url
from holdfast.wires.zookeeper import NEVER, Session
from holdfast.wires.zookeeper_asks import (
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

__all__ = ["ZooKeeperBackend", "open_store"]

TRIES = 8
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
        entry = self.attend(claim)
        try:
            session = await self.ready(entry.key, until)
            return await self._attempt(Attempt(session, entry, join, until))
        finally:
            entry.attended = self.runtime.now()

    async def _attempt(self, at: Attempt, *before: Ask) -> Grant | Busy:
        entry = at.entry
        if entry.path and entry.session != at.session.id:
            entry.reset()  # it went with its session
        elif entry.asked and not entry.path:
            await self._find(at)
        if entry.path:
            answer = await self._stand(at, *before)
            if answer is not None:
                return answer
            before = ()
        if at.anew:
            entry.reset()
            return await self._enter(at, *before)
        if before:
            await self.ask(at.session, *before)
        self.wake(entry)
        return Busy(0)

    async def _enter(self, at: Attempt, *before: Ask) -> Grant | Busy:
        """Makes a node and decides by the line that it finds itself in."""
        session, entry, until = at.session, at.entry, at.until
        claim = entry.claim
        parent = self.store.parent(claim.name)
        prefix = f"{parent}/{entry_prefix(claim)}"
        data = write_data(NodeData(entry.key, 0, (), 0, claim.label))
        self.store.entries[claim.owner] = entry
        self.store.debts.pop(claim.owner, None)
        entry.asked = True
        for _ in range(TRIES):
            create, listing = Create(prefix, data, self.store.acl), Listing(parent)
            sent = self.runtime.now()
            await self.ask(session, *before, create, listing, until=until)
            if create.error is None:
                path, stat = create.value
                entry.stand(path, stat.ephemeral_owner, stat.czxid)
                session.clock = stat.ctime / 1000, sent
                since = session.since(sent, entry.session)
                if since == NEVER:
                    raise BackendUnavailable(f"{self.store.display}: the session has just ended")
                answer = await self._decide(at, listing.value, since)
                if answer is not None:
                    return answer
            before = ()
            await self.make(session, parent, until=until)
        raise BackendUnavailable(f"{self.store.display}: {GONE_NAME}: {claim.name!r}")

    async def _stand(self, at: Attempt, *before: Ask) -> Grant | Busy | None:
        """Looks again from the place that it has; ``None`` if it has none any more."""
        session, entry, until = at.session, at.entry, at.until
        parent = self.store.parent(entry.claim.name)
        sent = self.runtime.now()
        # A recent proof is enough for a grant; an old one is renewed in the same trip.
        fresh = sent - session.proven < entry.key / 6 and entry.grant is None
        preview, entry.preview = entry.preview, None
        if preview is not None and fresh and not before and preview.usable(session, sent):
            since = session.proven_since(entry.session)
            return await self._decide(at, preview.listing.value, since)
        first: Ask = Sync(parent) if fresh else Multi([Check(entry.path)])
        listing = Listing(parent)
        await self.ask(session, *before, first, listing, until=until)
        if listing.error is not None or (isinstance(first, Multi) and first.failed):
            return None
        number = entry.session
        since = session.proven_since(number) if fresh else session.since(sent, number)
        return await self._decide(at, listing.value, since)

    async def _find(self, at: Attempt) -> None:
        """A create was not answered: adopts the node that it may have made in this session."""
        session, entry, until = at.session, at.entry, at.until
        entry.unsure = True
        parent = self.store.parent(entry.claim.name)
        listing = Listing(parent)
        await self.ask(session, Sync(parent), listing, until=until)
        if listing.error is not None:
            return
        line = Line(listing.value, self.where(entry.claim.name))
        reads = [Read(f"{parent}/{p.node}") for p in line.of_owner(digest(entry.claim.owner))]
        if reads:
            await self.ask(session, *reads, until=until)
        for read in reads:
            if read.error is None and read.value[1].ephemeral_owner == session.id:
                entry.stand(read.path, session.id, read.value[1].czxid)
                return

    # Deciding

    async def _decide(self, at: Attempt, nodes: list[str], since: float) -> Grant | Busy | None:
        entry = at.entry
        if since == NEVER or self.store.entries.get(entry.claim.owner) is not entry:
            return None  # its session has ended, or nobody had come for it in time
        front = front_of(entry.node, nodes) if entry.claim.mode is Mode.EXCLUSIVE else None
        if front is None:
            return await self._decide_by_line(at, nodes, since)
        if not front:
            return self._grant(entry, entry.token, (), since)
        if at.join and len(front) <= QUEUE_CAP and entry.node[-10:] < _SEQUENCE_LIMIT:
            return Busy(len(front) - 1, ref=(entry.key, front[-1]))
        return await self._decide_by_line(at, nodes, since)

    async def _decide_by_line(
        self, at: Attempt, nodes: list[str], since: float
    ) -> Grant | Busy | None:
        entry = at.entry
        try:
            line = Line(nodes, self.where(entry.claim.name))
            index = line.index(entry.node)
            if index is None:
                return None
            line.check(entry.claim, index, self.store.display)
        except BaseException:
            await self._withdraw(at)
            raise
        doubles = line.others_of(digest(entry.claim.owner), entry.node)
        if doubles:
            await self._drop(at, doubles)
        if index < line.admitted:
            if entry.claim.mode is Mode.SLOTS:
                return await self._take_slots(at, line, since)
            return self._grant(entry, entry.token, (), since)
        return await self._busy(at, line, index)

    async def _drop(self, at: Attempt, doubles: Sequence[str]) -> None:
        """Deletes nodes of the same owner that an unanswered create has left."""
        parent = self.store.parent(at.entry.claim.name)
        await self.ask(
            at.session, *(Delete(f"{parent}/{node}") for node in doubles), until=at.until
        )

    def _grant(self, entry: Entry, token: int, slots: tuple[int, ...], since: float) -> Grant:
        ref = (entry.key, entry.session, entry.path)
        grant = Grant(entry.claim, token, slots, since, ref)
        entry.ends = since + entry.claim.ttl
        entry.grant = grant
        return grant

    async def _take_slots(self, at: Attempt, line: Line, since: float) -> Grant | Busy | None:
        """Takes the lowest free slots. The zxid of that is the token: per slot it only grows."""
        session, entry, until = at.session, at.entry, at.until
        if entry.grant is not None:
            return self._grant(entry, entry.grant.token, entry.grant.slots, since)
        if entry.taking:
            return Busy(0, 0.01)  # another thread of this door is at it
        entry.taking = True
        try:
            for _ in range(TRIES):
                grant = await self._try_slots(at, line)
                if grant is not None:
                    return grant
                read, listing = Read(entry.path), Listing(self.store.parent(entry.claim.name))
                await self.ask(session, read, listing, until=until)
                if read.error is not None or listing.error is not None:
                    return None
                data, stat = read_data(read.value[0]), read.value[1]
                if data.slots:  # an earlier try was not answered, but done
                    token = token_of(Mode.SLOTS, data, stat)
                    return self._grant(entry, token, data.slots, since)
                entry.version = stat.version
                line = Line(listing.value, self.where(entry.claim.name))
            return Busy(0, 0.05)
        finally:
            entry.taking = False

    async def _try_slots(self, at: Attempt, line: Line) -> Grant | None:
        session, entry, until = at.session, at.entry, at.until
        slots = line.free_slots(entry.claim.weight, entry.claim.limit)
        if len(slots) < entry.claim.weight:
            return None
        parent, acl = self.store.parent(entry.claim.name), self.store.acl
        data = write_data(NodeData(entry.key, 0, slots, 0, entry.claim.label))
        parts = [Ephemeral(f"{parent}/{slot_name(slot)}", b"", acl) for slot in slots]
        # With its version, so that of two tries of which one was not answered one is done.
        multi = Multi([Write(entry.path, data, entry.version), *parts])
        sent = self.runtime.now()
        await self.ask(session, multi, until=until)
        if multi.failed:
            return None
        return self._grant(entry, multi.value[0].mzxid, slots, session.since(sent, entry.session))

    async def _busy(self, at: Attempt, line: Line, index: int) -> Busy:
        entry = at.entry
        place = index - line.admitted
        if not at.join:
            await self._withdraw(at)
            return Busy(place)
        if place >= QUEUE_CAP:
            await self._withdraw(at)
            return Busy(place, 1.0, reason=f"{QUEUE_CAP} already wait for {entry.claim.name!r}")
        if not 0 <= line.sequence(index) < SEQUENCE_LIMIT:
            await self._withdraw(at)
            reason = f"the line of {entry.claim.name!r} starts over"
            return Busy(place, self.runtime.between(0.05, 0.2), reason=reason)
        return Busy(place, ref=(entry.key, line.before(index)))

    async def _withdraw(self, at: Attempt) -> None:
        self.store.entries.pop(at.entry.claim.owner, None)
        await self.ask(at.session, Delete(at.entry.path), until=at.until)

    # Waiting

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        began = self.runtime.now()
        entry = await self.queue(claim, busy, until)
        preview = None if entry is None else entry.preview
        session = None if entry is None else self.store.sessions.get(entry.key)
        if entry is None or preview is None or session is None:
            return None
        # What the look has found is what an attempt would find. A wait that has lasted leaves it
        # to one: certain time would count from before the wait.
        now, brief = self.runtime.now(), entry.key / 6
        if now - began > brief or now - session.proven > brief or entry.grant is not None:
            return None
        since = session.proven_since(entry.session)
        first = claim.mode is Mode.EXCLUSIVE and preview.usable(session, now)
        if since == NEVER or not first or front_of(entry.node, preview.listing.value) != []:
            return None
        entry.preview = None
        return self._grant(entry, entry.token, (), since)

    # Ending

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        key, ending = self.ending(grant)
        known = self.store.entries.get(claim.owner)
        waits = known is not None and known.attended is None  # and says when it no longer does
        entry = self.store.entry(claim, self.runtime.now())
        self.attend(claim)
        try:
            session = await self.ready(key)
            # One that has a place may have been served meanwhile by its own thread, and have
            # released it: nobody would come for another. If it still waits, it lines up itself.
            anew = not entry.path
            if entry.key != key or (entry.asked and not entry.path):
                if ending:
                    await self.ask(session, *ending)
                at = Attempt(await self.ready(entry.key), entry, True, None, anew)
                answer = await self._attempt(at)
            else:
                at = Attempt(session, entry, True, None, anew)
                answer = await self._attempt(at, *ending)
            return bool(ending) and was_ours(ending[0]), answer
        finally:
            if not waits:
                entry.attended = self.runtime.now()

    # The end

    def forget(self) -> None:
        self.store.forget()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.say_goodbye(self.store.leave())


def open_store(url: Url, settings: Settings) -> ZooKeeperStore:
    """``zookeeper://[user:password@]host[:port][,host…][/path][?options]``."""
    options = read_options(url, settings)
    return ZooKeeperStore(options, url.path.rstrip("/"), settings)

"""``zookeeper://h1,h2,h3/path``: a line of ephemeral nodes per name, one session per ttl.

Taking a free name is one trip: the create of the own node and the listing of the line go out
back to back. The token is the zxid of the create (of the slots, for slots): it is the
ensemble's own order. Who waits watches the node in front of it. See ``zookeeper_line`` for what
is stored and ``wires.zookeeper`` for what makes a hold certain.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.contract import (
    QUEUE_CAP,
    Finding,
    Page,
    Renewal,
    Runtime,
    Settings,
    Signal,
    Waiting,
)
from holdfast.core.ordered import shown_unreadable
from holdfast.errors import BackendUnavailable, Incompatible, LimitMismatch, Unsupported
from holdfast.stores.zookeeper.client.calls import AsyncCall, BlockingCall, Call, Wake
from holdfast.stores.zookeeper.client.packets import (
    ANY_VERSION,
    Ask,
    Check,
    Checks,
    Container,
    Create,
    Delete,
    Ephemeral,
    Exists,
    Listing,
    Multi,
    Persistent,
    Plain,
    Read,
    Sync,
    Write,
)
from holdfast.stores.zookeeper.inspect import (
    MOST_SHOWN,
    read_line,
    read_standing,
    tick_finding,
    token_of,
)
from holdfast.stores.zookeeper.node import Attendance, Entry, Node
from holdfast.stores.zookeeper.pending import Debt, deletion
from holdfast.stores.zookeeper.queue import (
    SEQUENCE_LIMIT,
    Line,
    NodeData,
    Place,
    decode_name,
    digest,
    encode_name,
    entry_prefix,
    front_of,
    read_data,
    read_record,
    slot_name,
    slots_to_end,
    unreadable,
    write_data,
    write_record,
)
from holdfast.stores.zookeeper.session import NEVER, Session
from holdfast.stores.zookeeper.store import ZooKeeperStore
from holdfast.stores.zookeeper.url import read_options
from holdfast.stores.zookeeper.wakeups import Called, Look
from holdfast.url import Url

__all__ = ["ZooKeeperBackend", "open_store"]

TRIES = 8
MOMENT_SECONDS = 0.01
"""For another thread of this client that is at the same claim."""
Answer = TypeVar("Answer", Grant | Busy, Grant | Busy | None)
_SEQUENCE_LIMIT = f"{SEQUENCE_LIMIT:010}"
GONE_NAME = "the name's node vanished again and again"
DEEPEST_PATH = 64
GOODBYE_SECONDS = 1.0
BATCH = 1000
BATCH_LETTERS = 200_000
"""Servers take no request of a megabyte, and names may be long."""
GONE = "its node is gone: it ran out or was broken"
ENDED = "its ZooKeeper session has ended"
PURGE_SECONDS = 600.0
PURGED_AT_ONCE = 500


class Attempt(NamedTuple):
    """One attempt at a claim, as it goes from trip to trip."""

    session: Session
    entry: Entry
    join: bool
    until: float | None
    """By when the store must have answered; ``None``: in the time that every trip has."""
    anew: bool = True
    """Whether to line up anew if its place is gone."""


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


def was_ours(ending: Ask) -> bool:
    if isinstance(ending, Multi):
        return not ending.failed
    return ending.error is None


def _changed(ending: Ask) -> bool:
    """Whether a node has taken slots, or said something else, since it was read."""
    results = ending.value if isinstance(ending, Multi) else [ending.error]
    return any(isinstance(result, BadVersionError) for result in results)


class ZooKeeperBackend:
    """Admits claims in lines of nodes, one queue per name."""

    def __init__(self, store: ZooKeeperStore, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        self._call: type[Call] = BlockingCall if runtime.blocking else AsyncCall
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
        called = Called(entry.attendance, wake, self.runtime.now)
        look = Look(session, node, parent, called)
        session.watch(path, look.send)
        try:
            if front is not None:
                session.send(Read(path, watch=True).then(look.unless_set))
            else:
                session.send(Listing(path, watch=True).then(look.if_free))
            await self.listen(session, wake, until)
        finally:
            session.unwatch(path, look.send)

    # Ending

    async def release(self, grant: Grant) -> bool:
        key, ending = self.ending(grant)
        if not ending:
            return False
        await self.ask(await self.ready(key), *ending)
        return was_ours(ending[0])

    def ending(self, grant: Grant) -> tuple[int, list[Ask]]:
        """The key of the hold's session, and what ends it: nothing if the session has."""
        key, number, path = grant.ref
        entry = self.store.entries.pop(grant.claim.owner, None)
        node = None if entry is None else entry.node
        if entry is not None and node is not None:
            node.end()
            if node.path == path:
                key, number = entry.key, node.session
            if entry.unsure or node.path != path:
                late = self.runtime.now() + 2 * self.store.settings.request_seconds
                self.store.debts.owe(Debt(key, grant.claim, late))
        session = self.store.sessions.get(key)
        if session is None or session.id != number:
            return key, []
        parent = self.store.parent(grant.claim.name)
        ending = [deletion(parent, path, grant.slots)]
        if not 0 <= int(path[path.rindex(".") + 1 :]) < SEQUENCE_LIMIT:
            ending.append(Delete(parent))  # fails while somebody is there
        return key, ending

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        entry = self.store.entries.pop(claim.owner, None)
        node = None if entry is None else entry.node
        if node is not None:
            node.end()
        key = entry.key if entry is not None else math.ceil(claim.ttl)
        known = self.store.sessions.get(key)
        if known is None or not known.used:
            return  # nothing was ever sent
        # Should this fail, the session's thread goes on trying for as long as there is a session.
        debt = self.store.debts.owe(Debt(key, claim, 0.0))
        session = await self.ready(key, until)
        parent = self.store.parent(claim.name)
        listing = Listing(parent)
        asks: list[Ask] = [Sync(parent), listing]
        if node is not None and claim.mode is not Mode.SLOTS:
            asks.insert(0, Delete(node.path))
        await self.ask(session, *asks, until=until)
        if listing.error is None:
            line = Line(listing.value, self.where(claim.name))
            await self._delete(session, parent, line.of_owner(digest(claim.owner)), until)
        self.store.debts.settled(debt)

    async def _delete(
        self, session: Session, parent: str, places: Sequence[Place], until: float | None = None
    ) -> list[int]:
        """Deletes claims with whatever slots they have; the tokens of those that were there."""
        tokens: list[int] = []
        for _ in range(TRIES):
            reads = [Read(f"{parent}/{place.node}") for place in places]
            if not reads:
                break
            await self.ask(session, *reads, until=until)
            ends: list[tuple[Place, int, Ask]] = []
            for place, read in zip(places, reads, strict=True):
                if read.error is None:
                    data, stat = slots_to_end(read.value[0]), read.value[1]
                    end = deletion(parent, read.path, data.slots, stat.version)
                    ends.append((place, token_of(place.mode, data, stat), end))
            if ends:
                await self.ask(session, *(end for _, _, end in ends), until=until)
            tokens += [token for _, token, end in ends if was_ours(end)]
            places = [place for place, _, end in ends if _changed(end)]
        return tokens

    async def revoke(self, name: str) -> list[int]:
        session = await self.looking()
        parent = self.store.parent(name)
        listing = Listing(parent)
        await self.ask(session, Sync(parent), listing)
        if listing.error is not None:
            return []
        line = Line(listing.value, self.where(name))
        return await self._delete(session, parent, line.places[: line.admitted])

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

    # Keeping

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

    # Moving a hold to a longer session, for ``extend(ttl=…)``

    async def move(self, entry: Entry, node: Node, grant: Grant, until: float) -> None:
        """Puts a hold on the session of a longer ttl; a hold that is gone keeps its session."""
        claim = grant.claim
        session = await self.ready(math.ceil(claim.ttl), until)
        number, acl = session.id, self.store.acl
        parent = self.store.parent(claim.name)
        data = NodeData(math.ceil(claim.ttl), 0, grant.slots, grant.token, claim.label)
        parts: list[Ask] = [Delete(node.path), Ephemeral(node.path, write_data(data), acl)]
        for slot in grant.slots:
            path = f"{parent}/{slot_name(slot)}"
            parts += [Delete(path), Ephemeral(path, b"", acl)]
        node.moving = math.ceil(claim.ttl)
        multi = Multi(parts)
        await self.ask(session, multi, until=until)
        if session.id != number:
            raise BackendUnavailable(f"{self.store.display}: the session has just ended")
        if not multi.failed:
            entry.key, node.session = node.moving, number
        node.moving = 0

    async def find_session(self, entry: Entry, node: Node, until: float) -> None:
        """A move was not answered: asks to which session the node belongs now."""
        session = await self.ready(entry.key, until)
        read = Read(node.path)
        await self.ask(session, read, until=until)
        if read.error is None:
            owner = read.value[1].ephemeral_owner
            for key in (entry.key, node.moving):
                known = self.store.sessions.get(key)
                if known is not None and known.id == owner:
                    entry.key, node.session = key, owner
        node.moving = 0

    # Looking

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
        lines = [
            read_line(found, self.where(name)) for name, found in zip(names, lists, strict=True)
        ]
        reads = [
            []
            if isinstance(line, Incompatible)
            else [Read(f"{self.store.parent(name)}/{p.node}") for p in line.places[:MOST_SHOWN]]
            for name, line in zip(names, lines, strict=True)
        ]
        if flat := [read for some in reads for read in some]:
            await self.ask(await self.looking(), *flat)
        return [
            line
            if isinstance(line, Incompatible)
            else read_standing(name, line, some, self.where(name))
            for name, line, some in zip(names, lines, reads, strict=True)
        ]

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

    async def probe(self) -> list[Finding]:
        session = await self.ready(0)
        await self.make(session, self.store.lines(), Persistent)
        floor = session.floor or 0.0
        findings = [
            Finding("connection", f"{self.store.display} answers, and lets us write"),
            Finding("sessions", f"the shortest ttl is {max(1.0, floor):g} s"),
            tick_finding(self.store.options.tick, floor),
        ]
        if len(self.store.options.hosts.split(",")) < 3:
            detail = "fewer than three servers are named: losing one may stop everything"
            findings.append(Finding("ensemble", detail, "warning"))
        if not self.store.options.client:
            detail = "nodes are open to everybody who reaches the servers"
            findings.append(Finding("access", detail, "warning"))
        return findings

    # Records

    def _record_path(self, name: str) -> str:
        return f"{self.store.root}/records/{encode_name(name)}"

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        _, _, hold = grant.ref
        session = await self.looking()
        path = self._record_path(grant.claim.name)
        data = write_record(grant.token, keep_seconds, value)
        change: Ask = Write(path, data)
        for _ in range(TRIES):
            multi = Multi([Check(hold), change])
            await self.ask(session, multi)
            if not multi.failed:
                await self._purge(session)
                return True
            if isinstance(multi.value[0], NoNodeError):
                return False
            if not isinstance(multi.value[1], NoNodeError):  # somebody made it meanwhile
                change = Write(path, data)
                continue
            if isinstance(change, Plain):
                await self.make(session, f"{self.store.root}/records", Persistent)
            change = Plain(path, data, self.store.acl)
        raise BackendUnavailable(f"{self.where(grant.claim.name)}: the record can't be written")

    async def recall(self, name: str) -> Record | None:
        session = await self.looking()
        read = Read(self._record_path(name))
        await self.ask(session, read)
        if read.error is not None:
            return None
        kept = read_record(read.value[0])
        if kept is None:
            raise unreadable(f"the record of {self.where(name)}")
        age = self._wall(session) - read.value[1].mtime / 1000
        if age >= kept.keep_seconds:
            await self.ask(session, Delete(read.path, read.value[1].version))
            return None
        return Record(kept.value, kept.token, age)

    def _wall(self, session: Session) -> float:
        """The servers' time, as the session's last new node told it; else our own."""
        told, moment = session.clock
        return told + self.runtime.now() - moment if told else self.runtime.wall()

    async def _purge(self, session: Session) -> None:
        """Now and then deletes records whose time is over and that nobody asked for again."""
        now = self.runtime.now()
        if now - self.store.records_purged < PURGE_SECONDS:
            return
        self.store.records_purged = now
        listing = Listing(f"{self.store.root}/records")
        await self.ask(session, listing)
        names = [decode_name(node) for node in (listing.value or ())[:PURGED_AT_ONCE]]
        reads = [Read(self._record_path(name)) for name in names]
        if reads:
            await self.ask(session, *reads)
        wall = self._wall(session)
        over: list[Ask] = []
        for read in reads:
            kept = read_record(read.value[0]) if read.error is None else None
            if kept is not None and wall - read.value[1].mtime / 1000 >= kept.keep_seconds:
                over.append(Delete(read.path, read.value[1].version))
        if over:
            await self.ask(session, *over)

    # Requests

    def where(self, name: str) -> str:
        """A name for messages."""
        return f"{name!r} on {self.store.display}"

    async def ready(self, key: int, until: float | None = None) -> Session:
        """The session of a ttl, connected; raises if that takes longer than a request may."""
        known = self.store.sessions.get(key)
        if known is not None and known.up and not known.dead:
            return known
        session = self.store.session(key)
        if session.up:
            return session
        patience = self.runtime.now() + self.store.settings.request_seconds
        signal = self.runtime.signal()
        if session.arrival(signal.set):
            try:
                await self.runtime.wait(signal, patience if until is None else min(until, patience))
            finally:
                session.leave(signal.set)
        session.retire()
        session.check()
        return session

    async def looking(self) -> Session:
        """Any session: to look, it does not matter which."""
        for key, session in list(self.store.sessions.items()):
            if session.up:
                return await self.ready(key)
        return await self.ready(0)

    def seconds(self, until: float | None) -> float:
        """How long a request may take."""
        seconds = self.store.settings.request_seconds
        return seconds if until is None else min(seconds, until - self.runtime.now())

    async def ask(self, session: Session, *asks: Ask, until: float | None = None) -> None:
        """One trip: requests back to back, and all their answers."""
        if self.runtime.blocking:
            session.ask(self.seconds(until), asks)
            return
        call = self._call()
        session.start(call, *asks)
        await session.finish(call, self.seconds(until), *asks)

    def wake_up(self) -> Wake:
        """What ``listen`` waits for."""
        return BlockingCall() if self.runtime.blocking else self.runtime.signal()

    async def listen(self, session: Session, wake: Wake, until: float) -> None:
        """Until it is set: by an event of the session, or by anybody else."""
        if isinstance(wake, BlockingCall):
            session.reader.wait(wake, until - self.runtime.now())
        else:
            await self.runtime.wait(cast("Signal", wake), until)

    async def make(
        self,
        session: Session,
        path: str,
        leaf: type[Create] = Container,
        until: float | None = None,
    ) -> None:
        """Makes a node where it is missing, and what is missing above it."""
        missing: list[Create] = [leaf(path, b"", self.store.acl)]
        paths = [path]
        for _ in range(DEEPEST_PATH):
            await self.ask(session, missing[-1], until=until)
            error = missing[-1].error
            if isinstance(error, NoNodeError):
                paths.append(paths[-1].rpartition("/")[0])
                missing.append(Persistent(paths[-1], b"", self.store.acl))
                continue
            if error is not None and not isinstance(error, NodeExistsError):
                raise BackendUnavailable(f"{self.store.display} does not make {path!r}") from error
            missing.pop()
            paths.pop()
            if not missing:
                return
            missing[-1] = type(missing[-1])(paths[-1], b"", self.store.acl)
        raise BackendUnavailable(f"{self.store.display}: {path!r} vanished again and again")

    # The end

    def forget(self) -> None:
        self.store.forget()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self.say_goodbye(self.store.leave(self))

    async def say_goodbye(self, sessions: Sequence[Session]) -> None:
        """Ends sessions, and with them whatever they still hold."""
        for session in sessions:
            if self.runtime.blocking:
                session.close(GOODBYE_SECONDS)
            else:
                await asyncio.to_thread(session.close, GOODBYE_SECONDS)


def open_store(url: Url, settings: Settings) -> ZooKeeperStore:
    """``zookeeper://[user:password@]host[:port][,host…][/path][?options]``."""
    options = read_options(url, settings)
    return ZooKeeperStore(options, url.path.rstrip("/"), settings)

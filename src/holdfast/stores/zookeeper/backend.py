"""All contract methods of the ZooKeeper store, in one class.

Acquiring a free name is one round trip: the create of the claim's node and the listing of the
queue are sent back to back. The token is the zxid of the create; for slots, the zxid of the
transaction that takes the slots. So tokens follow the ensemble's own order. A waiting claim
watches the node ahead of it. ``queue`` describes what is stored; ``session`` explains from when on
the time of a hold is certain.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar, cast

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.backoff import (
    DRAINING_QUEUE_SECONDS,
    NO_SESSION_SECONDS,
    NODE_WATCH_RETRY_SECONDS,
    UNQUEUED_SECONDS,
)
from holdfast.core.contract import (
    QUEUE_CAP,
    Finding,
    Page,
    Renewal,
    Runtime,
    Signal,
    Waiting,
)
from holdfast.core.ordered import shown_unreadable
from holdfast.errors import BackendUnavailable, Incompatible, LimitMismatch, Unsupported
from holdfast.io.blocking import WORLD as BLOCKING_WORLD
from holdfast.io.connection import World
from holdfast.stores.zookeeper.client.completion import BlockingCompletion, Completion
from holdfast.stores.zookeeper.client.greeting import Access
from holdfast.stores.zookeeper.client.packets import (
    ANY_VERSION,
    BadVersion,
    Check,
    Checks,
    Container,
    Create,
    Delete,
    Ephemeral,
    Exists,
    Listing,
    Multi,
    NodeExists,
    NoNode,
    Persistent,
    Plain,
    Read,
    Request,
    Sync,
    Write,
)
from holdfast.stores.zookeeper.inspect import (
    FEW_SHOWN,
    MOST_SHOWN,
    read_lock_info,
    read_queue,
    tick_finding,
    token_of,
)
from holdfast.stores.zookeeper.node import ClaimNode, Presence, ZooKeeperEntry
from holdfast.stores.zookeeper.pending import PendingDelete, deletion
from holdfast.stores.zookeeper.queue import (
    SEQUENCE_LIMIT,
    NodeData,
    NodeQueue,
    QueuedNode,
    decode_name,
    digest,
    encode_name,
    entry_prefix,
    handed_node,
    nodes_ahead,
    read_data,
    read_record,
    renamed,
    slot_name,
    slots_to_end,
    unreadable,
    write_data,
    write_record,
)
from holdfast.stores.zookeeper.session import NEVER, ZooKeeperSession
from holdfast.stores.zookeeper.store import ZooKeeperStore
from holdfast.stores.zookeeper.wakeups import ListingPrefetch, WaitEnd, WakeSignal

__all__ = ["ZooKeeperBackend"]

TRIES = 8
CONCURRENT_ATTEMPT_SECONDS = 0.01
"""Back-off of an attempt while another thread of this client works on the same claim."""
SLOTS_RETRY_SECONDS = 0.05
"""Back-off after ``TRIES`` failed attempts to take slots."""
FULL_QUEUE_SECONDS = 1.0
UNUSED_NAME_SECONDS = 1.0
"""Polling interval of ``watch`` for a name without a node."""
CERTAIN_SHARE = 6
"""A proof that is younger than the ttl divided by this is recent enough for a grant."""
DEEPEST_PATH = 64
CLOSE_SECONDS = 1.0
BATCH = 1000
BATCH_LETTERS = 200_000
"""Servers refuse a request of a megabyte, and paths may be long."""
PURGE_SECONDS = 600.0
USUAL_TTL = 30
"""The default ttl of clients, for ``check()``."""
PURGED_AT_ONCE = 500
NAME_VANISHED = "the name's node was deleted several times while a claim was being created"
NODE_GONE = "its node is gone: it ran out or was broken"
SESSION_ENDED = "its ZooKeeper session has ended"
Answer = TypeVar("Answer", Grant | Busy, Grant | Busy | None)
_SEQUENCE_LIMIT = f"{SEQUENCE_LIMIT:010}"


class Attempt(NamedTuple):
    """One attempt at a claim, passed from step to step."""

    session: ZooKeeperSession
    entry: ZooKeeperEntry
    join: bool
    until: float | None
    """Deadline for the store's replies; ``None`` for the usual time of a request."""
    rejoin: bool = True
    """Whether to create a new node if the claim has none in this session."""


class _RenewBatch:
    """The holds and waiting claims of one session, and the requests that renew them."""

    def __init__(self, key: int, session: ZooKeeperSession) -> None:
        self.key, self.session = key, session
        self.grants: list[Grant] = []
        self.held: list[ClaimNode] = []
        """The nodes of ``grants``, in the same order. No pairs: there may be many."""
        self.waits: list[tuple[Waiting, ZooKeeperEntry, ClaimNode]] = []
        self.sent = 0.0
        self.number = 0
        """The session's id when the requests were sent."""
        self.checks: list[tuple[list[str], Checks]] = []
        """Per request: the paths, and the transaction that checks that they exist."""
        self.completion: Completion | None = None

    def paths(self) -> list[str]:
        held = [node.path for node in self.held]
        return held + [node.path for _, _, node in self.waits]


def _portions(paths: Sequence[str]) -> Iterator[list[str]]:
    """Splits paths into lists that fit into one request each."""
    portion: list[str] = []
    letters = 0
    for path in paths:
        if len(portion) == BATCH or letters > BATCH_LETTERS:
            yield portion
            portion, letters = [], 0
        portion.append(path)
        letters += len(path)
    yield portion


class _RenewResult:
    """Collects the fields of one ``Renewal`` over all sessions of a client."""

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.starts: list[float] = []
        """When the renewed certain time began, for each session."""

    def renewal(self) -> Renewal:
        since = min(self.starts, default=None)
        return Renewal(self.lost, self.unknown, frozenset(self.forgotten), since)


def _succeeded(delete: Request) -> bool:
    """Whether a request made by ``deletion`` has deleted the claim's node."""
    if isinstance(delete, Multi):
        return not delete.failed
    return delete.error is None


def _was_modified(delete: Request) -> bool:
    """Whether a delete failed because the node's data changed after it was read: the claim has
    taken slots, or written how many wait behind it."""
    results = delete.value if isinstance(delete, Multi) else [delete.error]
    return any(isinstance(result, BadVersion) for result in results)


class ZooKeeperBackend:
    """Admits claims in order of their nodes, one queue of nodes per name."""

    def __init__(self, store: ZooKeeperStore, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        self._completion: type[Completion] = BlockingCompletion
        self._world: World = BLOCKING_WORLD
        if not runtime.blocking:  # loaded here: an import would delay the event loop later
            from holdfast.stores.zookeeper.client import aio

            self._completion, self._world, self._attach = aio.AsyncCompletion, aio.WORLD, aio.attach
        self._closed = False

    # Acquiring

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        entry, presence = self._begin_attempt(claim)
        try:
            session = await self.connected_session(entry.key, until)
            answer = await self._attempt(Attempt(session, entry, join, until))
            if not join and type(answer) is Busy:
                self.store.entries.pop(claim.owner, None)
            return answer
        except (LimitMismatch, Incompatible, Unsupported, BackendUnavailable) as error:
            changed = isinstance(error, BackendUnavailable) and not error.final
            if not changed and (entry.node is None or entry.node.ended):
                self.store.entries.pop(claim.owner, None)
            raise
        finally:
            presence.left = self.runtime.now()

    async def _attempt(self, at: Attempt, *before: Request) -> Grant | Busy:
        entry, node = at.entry, at.entry.node
        if node is not None and node.session == at.session.id and not node.ended:
            answer = await self._attempt_again(at, node, *before)
            if answer is not None:
                return answer
        elif before:
            await self.request(at.session, *before)
        if at.rejoin:
            return await self._one_at_a_time(at, lambda: self._create_node(at, node))
        self._wake(entry)
        return Busy(0)

    async def _one_at_a_time(
        self, at: Attempt, work: Callable[[], Awaitable[Answer]]
    ) -> Answer | Busy:
        """Runs work that only one attempt at a claim may do at a time: create its node, or take
        its slots. Returns ``Busy`` at once if another attempt is doing so."""
        in_progress = at.entry.in_progress
        if in_progress.get(0) is at:
            return await work()
        try:
            if in_progress.setdefault(0, at) is not at:
                return Busy(0, CONCURRENT_ATTEMPT_SECONDS)
            return await work()
        finally:
            if in_progress.get(0) is at:
                in_progress.clear()

    async def _create_node(self, at: Attempt, gone: ClaimNode | None) -> Grant | Busy:
        """Creates the claim's node and decides by the queue listed right behind it. ``gone`` is
        the claim's last node, which has ended."""
        session, entry, until = at.session, at.entry, at.until
        claim = entry.claim
        known = self.store.entries.setdefault(claim.owner, entry)
        if known is not entry or entry.node is not gone:
            return Busy(0, CONCURRENT_ATTEMPT_SECONDS)  # another thread has created one
        self._end_node(entry, gone)
        self.store.pending_deletes.cancel(claim.owner)
        if entry.create_pending:
            found = entry.node = await self._find_created_node(at)
            answer = None if found is None else await self._attempt_again(at, found)
            if answer is not None:
                return answer
            self._end_node(entry, found)
        parent = self.store.parent(claim.name)
        prefix = f"{parent}/{entry_prefix(claim)}"
        data = write_data(NodeData(entry.key, 0, (), 0, claim.label))
        for _ in range(TRIES):
            create, listing = Create(prefix, data, self.store.acl), Listing(parent)
            sent = self.runtime.now()
            entry.create_pending = True
            await self.request(session, create, listing, until=until)
            entry.create_pending = False
            if create.error is None:
                path, stat = create.value
                node = entry.node = ClaimNode(path, stat.ephemeral_owner, stat.czxid)
                session.clock = stat.ctime / 1000, sent
                since = session.since(sent, node.session)
                if since == NEVER:
                    raise BackendUnavailable(f"{self.store.display}: the session has just ended")
                answer = await self._decide(at, node, listing.value, since)
                if answer is not None:
                    return answer
                self._end_node(entry, node)
            await self.make_node(session, parent, until=until)
        raise BackendUnavailable(f"{self.store.display}: {NAME_VANISHED}: {claim.name!r}")

    def _end_node(self, entry: ZooKeeperEntry, gone: ClaimNode | None) -> None:
        """Ends a node of the claim, so that no later attempt adopts it."""
        if gone is not None:
            gone.end()
            entry.past_paths |= {gone.path}

    async def _attempt_again(
        self, at: Attempt, node: ClaimNode, *before: Request
    ) -> Grant | Busy | None:
        """Decides for the node that the claim has already; ``None`` if that node is gone."""
        session, entry, until = at.session, at.entry, at.until
        parent = self.store.parent(entry.claim.name)
        sent = self.runtime.now()
        # A recent proof is enough for a grant; an old one is renewed in the same round trip.
        fresh = sent - session.proven < entry.key / CERTAIN_SHARE and node.grant is None
        prefetched, node.prefetched = node.prefetched, None
        if prefetched is not None and fresh and not before and prefetched.usable(session, sent):
            since = session.proven_since(node.session)
            return await self._decide(at, node, prefetched.listing.value, since)
        if prefetched is None and not before and node.grant is None:
            busy, gone = await self._recheck(at, node)
            if busy is not None or gone:
                return busy
        first: Request = Sync(parent) if fresh else Multi([Check(node.path)])
        listing = Listing(parent)
        await self.request(session, *before, first, listing, until=until)
        if listing.error is not None or (isinstance(first, Multi) and first.failed):
            return None
        number = node.session
        since = session.proven_since(number) if fresh else session.since(sent, number)
        return await self._decide(at, node, listing.value, since)

    async def _recheck(self, at: Attempt, node: ClaimNode) -> tuple[Busy | None, bool]:
        """The claim's last answer, if the node that it waits for is still ahead of it; and whether
        its own node is gone. Costs the same however many wait."""
        busy, claim = node.busy, at.entry.claim
        ahead = None if busy is None else busy.ref[1]
        if busy is None or ahead is None:
            return None, False
        own, other = Exists(node.path), Exists(f"{self.store.parent(claim.name)}/{ahead}")
        await self.request(at.session, own, other, until=at.until)
        if own.value is None:
            return None, True
        # A node that was written, or created again in another session, may have slots: then it is
        # not in the way.
        in_front = other.value is not None and (
            claim.mode is not Mode.SLOTS
            or (other.value.version == 0 and other.value.czxid < own.value.czxid)
        )
        return (busy if in_front else None), False

    async def _find_created_node(self, at: Attempt) -> ClaimNode | None:
        """The node that an unanswered create has made in this session, if it has made one."""
        session, entry, until = at.session, at.entry, at.until
        entry.create_unanswered = True
        parent = self.store.parent(entry.claim.name)
        listing = Listing(parent)
        await self.request(session, Sync(parent), listing, until=until)
        if listing.error is not None:
            return None
        queue = NodeQueue(listing.value, self.where(entry.claim.name))
        reads = [Read(f"{parent}/{p.node}") for p in queue.of_owner(digest(entry.claim.owner))]
        if reads:
            await self.request(session, *reads, until=until)
        for read in reads:
            known = read.path in entry.past_paths
            if not known and read.error is None and read.value[1].ephemeral_owner == session.id:
                return ClaimNode(read.path, session.id, read.value[1].czxid)
        return None

    # Deciding

    async def _decide(
        self, at: Attempt, node: ClaimNode, nodes: list[str], since: float
    ) -> Grant | Busy | None:
        entry = at.entry
        if since == NEVER or node.ended:
            return None  # its session has ended, or the node was ended while its owner was absent
        ahead = nodes_ahead(node.name, nodes) if entry.claim.mode is Mode.EXCLUSIVE else None
        if ahead is None:
            return await self._decide_by_queue(at, node, nodes, since)
        if not ahead:
            return self._grant(entry, node, node.token, (), since)
        if at.join and len(ahead) <= QUEUE_CAP and node.name[-10:] < _SEQUENCE_LIMIT:
            node.busy = Busy(len(ahead) - 1, ref=(entry.key, ahead[-1]))
            return node.busy
        return await self._decide_by_queue(at, node, nodes, since)

    async def _decide_by_queue(
        self, at: Attempt, node: ClaimNode, nodes: list[str], since: float
    ) -> Grant | Busy | None:
        entry = at.entry
        try:
            queue = NodeQueue(nodes, self.where(entry.claim.name))
            index = queue.index(node.name)
            if index is None:
                return None
            queue.check(entry.claim, index, self.store.display)
        except BaseException:
            await self._withdraw(at, node)
            raise
        # Left by unanswered creates. A duplicate that stays is deleted after this node's end.
        duplicates = queue.others_of(digest(entry.claim.owner), node.name)
        if duplicates:
            await self._delete_duplicates(at, duplicates)
        if index < queue.admitted:
            if entry.claim.mode is Mode.SLOTS:
                return await self._one_at_a_time(
                    at, lambda: self._take_slots(at, node, queue, since)
                )
            return self._grant(entry, node, node.token, (), since)
        return await self._busy(at, node, queue, index)

    async def _delete_duplicates(self, at: Attempt, duplicates: Sequence[str]) -> None:
        parent = self.store.parent(at.entry.claim.name)
        await self.request(
            at.session, *(Delete(f"{parent}/{node}") for node in duplicates), until=at.until
        )

    def _grant(
        self,
        entry: ZooKeeperEntry,
        node: ClaimNode,
        token: int,
        slots: tuple[int, ...],
        since: float,
    ) -> Grant | None:
        """The grant of a claim; ``None`` if its node was ended at the same time."""
        ref = (entry.key, node.session, node.path)
        grant = Grant(entry.claim, token, slots, since, ref)
        return grant if node.hold(grant, since + entry.claim.ttl) else None

    async def _take_slots(
        self, at: Attempt, node: ClaimNode, queue: NodeQueue, since: float
    ) -> Grant | Busy | None:
        """Takes the lowest free slots. The token is the zxid of that transaction, so that the
        tokens of each slot only grow."""
        session, entry, until = at.session, at.entry, at.until
        grant = node.grant
        if grant is not None:
            return self._grant(entry, node, grant.token, grant.slots, since)
        for _ in range(TRIES):
            grant = await self._try_slots(at, node, queue)
            if grant is not None or node.ended:
                return grant
            read, listing = Read(node.path), Listing(self.store.parent(entry.claim.name))
            await self.request(session, read, listing, until=until)
            if read.error is not None or listing.error is not None:
                return None
            data = read_data(read.value[0], self.where(entry.claim.name))
            stat = read.value[1]
            if data.slots:  # an earlier transaction was executed, but its reply was lost
                token = token_of(Mode.SLOTS, data, stat)
                return self._grant(entry, node, token, data.slots, since)
            node.version = stat.version
            queue = NodeQueue(listing.value, self.where(entry.claim.name))
        return Busy(0, SLOTS_RETRY_SECONDS)

    async def _try_slots(self, at: Attempt, node: ClaimNode, queue: NodeQueue) -> Grant | None:
        session, entry, until = at.session, at.entry, at.until
        slots = queue.free_slots(entry.claim.weight, entry.claim.limit)
        if len(slots) < entry.claim.weight:
            return None
        parent, acl = self.store.parent(entry.claim.name), self.store.acl
        data = write_data(NodeData(entry.key, 0, slots, 0, entry.claim.label))
        parts = [Ephemeral(f"{parent}/{slot_name(slot)}", b"", acl) for slot in slots]
        # The version makes sure that only one of two tries is executed if a reply was lost.
        multi = Multi([Write(node.path, data, node.version), *parts])
        sent = self.runtime.now()
        await self.request(session, multi, until=until)
        if multi.failed:
            return None
        since = session.since(sent, node.session)
        return self._grant(entry, node, multi.value[0].mzxid, slots, since)

    async def _busy(self, at: Attempt, node: ClaimNode, queue: NodeQueue, index: int) -> Busy:
        entry = at.entry
        waiting_ahead = index - queue.admitted
        if not at.join:
            await self._withdraw(at, node)
            return Busy(waiting_ahead)
        if waiting_ahead >= QUEUE_CAP:
            await self._withdraw(at, node)
            reason = f"{QUEUE_CAP} already wait for {entry.claim.name!r}"
            return Busy(waiting_ahead, FULL_QUEUE_SECONDS, reason=reason)
        if not 0 <= queue.sequence(index) < SEQUENCE_LIMIT:
            await self._withdraw(at, node)
            reason = (
                f"the queue of {entry.claim.name!r} must be empty once: its counter is at its end"
            )
            pause = self.runtime.between(*DRAINING_QUEUE_SECONDS)
            return Busy(waiting_ahead, pause, reason=reason)
        node.busy = Busy(waiting_ahead, ref=(entry.key, queue.node_to_watch(index)))
        return node.busy

    async def _withdraw(self, at: Attempt, node: ClaimNode) -> None:
        """Deletes the claim's own node."""
        if node.end():
            await self.request(at.session, Delete(node.path), until=at.until)

    # Waiting

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        began = self.runtime.now()
        entry = await self._wait_in_queue(claim, busy, until)
        node = None if entry is None else entry.node
        session = None if entry is None else self.store.sessions.get(entry.key)
        if entry is None or node is None or node.prefetched is None or session is None:
            return None
        # The prefetched listing is what an attempt would read. After a long wait the grant is left
        # to an attempt: its certain time would count from before the wait.
        now, brief, prefetched = self.runtime.now(), entry.key / CERTAIN_SHARE, node.prefetched
        if now - began > brief or now - session.proven > brief or node.grant is not None:
            return None
        since = session.proven_since(node.session)
        first = claim.mode is Mode.EXCLUSIVE and prefetched.usable(session, now)
        if since == NEVER or not first or nodes_ahead(node.name, prefetched.listing.value) != []:
            return None
        node.prefetched = None
        return self._grant(entry, node, node.token, (), since)

    def _begin_attempt(self, claim: Claim) -> tuple[ZooKeeperEntry, Presence]:
        """Marks the owner of a claim as present, and makes the signal for its next wait."""
        entry = self.store.entry(claim, self.runtime.now())
        entry.presence = presence = Presence()
        if entry.wake_signal is None or entry.wake_signal.is_set():
            # Before the first request: a nudge from here on is not lost, it ends the wait.
            entry.wake_signal = self._new_wake_signal()
        return entry, presence

    def nudge(self, claim: Claim) -> None:
        entry = self.store.entries.get(claim.owner)
        if entry is not None:
            self._wake(entry)

    def _wake(self, entry: ZooKeeperEntry) -> None:
        """Ends the wait for a claim."""
        if entry.wake_signal is not None:
            entry.wake_signal.set()

    async def _wait_in_queue(self, claim: Claim, busy: Busy, until: float) -> ZooKeeperEntry | None:
        """Waits with the claim's node. Returns the entry if a listing may have been prefetched."""
        entry = self.store.entries.get(claim.owner)
        node, wake = (None, None) if entry is None else (entry.node, entry.wake_signal)
        if entry is None or node is None or wake is None or busy.ref is None:
            pause = self.runtime.between(*UNQUEUED_SECONDS)
            await self.runtime.sleep(max(0.0, min(pause, until - self.runtime.now())))
            return None
        entry.presence = presence = Presence()
        try:
            await self._wait_behind(entry, node, wake, busy.ref[1], until)
        except BackendUnavailable:
            # No busy loop during an outage: the next attempt waits for the connection.
            await self.runtime.sleep(self.runtime.between(*NO_SESSION_SECONDS))
        finally:
            presence.left = self.runtime.now()
        return entry

    async def _wait_behind(
        self,
        entry: ZooKeeperEntry,
        node: ClaimNode,
        wake: WakeSignal,
        ahead: str | None,
        until: float,
    ) -> None:
        """Watches the node ahead, or with ``None`` the whole queue, until the claim is woken."""
        session = await self.connected_session(entry.key, until)
        parent = self.store.parent(entry.claim.name)
        path = parent if ahead is None else f"{parent}/{ahead}"
        wait_end = WaitEnd(entry.presence, wake, self.runtime.now)
        prefetch = ListingPrefetch(session, node, parent, wait_end)
        session.watch(path, prefetch.send)
        try:
            if ahead is not None:
                session.send(Read(path, watch=True).then(prefetch.if_watch_failed))
            else:
                session.send(Listing(path, watch=True).then(prefetch.if_admitted))
            await self._wait_for(session, wake, until)
        finally:
            session.unwatch(path, prefetch.send)

    # Releasing

    async def release(self, grant: Grant) -> bool:
        try:
            key, deletes = self._release_requests(grant)
            if not deletes:
                return False
            await self.request(await self.connected_session(key), *deletes)
            return _succeeded(deletes[0])
        finally:
            self.store.releasing.pop(grant.claim.owner, None)

    def _release_requests(self, grant: Grant) -> tuple[int, list[Request]]:
        """The key of the hold's session, and the requests that release the hold: none if the
        session has ended. Removes the claim's entry; the caller removes it from ``releasing``."""
        key, number, path = grant.ref
        known = self.store.entries.get(grant.claim.owner)
        self.store.releasing[grant.claim.owner] = key if known is None else known.key
        entry = self.store.entries.pop(grant.claim.owner, None)
        node = None if entry is None else entry.node
        if entry is not None and node is not None:
            node.end()
            if node.path == path:
                key, number = entry.key, node.session
            if entry.create_unanswered or node.path != path:
                late = self.runtime.now() + 2 * self.store.settings.request_seconds
                self.store.pending_deletes.add(PendingDelete(key, grant.claim, late))
        session = self.store.sessions.get(key)
        if session is None or session.id != number:
            return key, []
        parent = self.store.parent(grant.claim.name)
        deletes = [deletion(parent, path, grant.slots)]
        if not 0 <= int(path[path.rindex(".") + 1 :]) < SEQUENCE_LIMIT:
            deletes.append(Delete(parent))  # fails while the name has other nodes
        return key, deletes

    # Hand-over

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        """Moves the hold to a session of its own, whose connection then ends, but not the session.
        Its node gets a name without the owner, so that no late delete of the owner's nodes is
        about it."""
        claim, entry = grant.claim, self.store.entries.get(grant.claim.owner)
        node = None if entry is None else entry.node
        if entry is None or node is None or node.grant is None:
            return None
        handed = renamed(node.name, claim._replace(owner=secrets.token_hex(16)))
        session = self.store.session_alone(math.ceil(claim.ttl))
        try:
            await session.open(self.runtime, self._world, until)
            data = NodeData(math.ceil(claim.ttl), 0, grant.slots, grant.token, claim.label)
            multi = self._replacing(claim, node.name, handed, data)
            await self.request(session, multi, until=until)
        except BaseException:
            session.close()
            raise
        if multi.failed:
            session.close()
            return None
        self._release_requests(grant)  # ends what is known of it here, and sends nothing
        self.store.releasing.pop(claim.owner, None)
        session.disconnect()
        return (handed,)

    def _replacing(self, claim: Claim, old: str, new: str, data: NodeData) -> Multi:
        """Replaces a node and its slots by a node of the same place in the queue, and of the
        session that sends this. Fails if the node is gone."""
        parent, acl = self.store.parent(claim.name), self.store.acl
        parts: list[Request] = [
            Delete(f"{parent}/{old}"),
            Ephemeral(f"{parent}/{new}", write_data(data), acl),
        ]
        for slot in data.slots:
            path = f"{parent}/{slot_name(slot)}"
            parts += [Delete(path), Ephemeral(path, b"", acl)]
        return Multi(parts)

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        handed = handed_node(grant.ref, claim)
        entry, presence = self._begin_attempt(claim)
        try:
            session = await self.connected_session(entry.key, until)
            taken = await self._take_over(Attempt(session, entry, False, until), grant, handed)
            if taken is None:
                self.store.entries.pop(claim.owner, None)
            return taken
        finally:
            presence.left = self.runtime.now()

    async def _take_over(self, at: Attempt, old: Grant, handed: str) -> Grant | None:
        session, entry, until = at.session, at.entry, at.until
        claim, parent = entry.claim, self.store.parent(entry.claim.name)
        if entry.node is None and entry.create_pending:
            entry.node = await self._find_created_node(at)
        sent, number = self.runtime.now(), session.id
        if entry.node is None:
            read = Read(f"{parent}/{handed}")
            await self.request(session, Sync(parent), read, until=until)
            data = None if read.error else read_data(read.value[0], self.where(claim.name))
            if data is None or token_of(claim.mode, data, read.value[1]) != old.token:
                return None
            name, entry.create_pending = renamed(handed, claim), True
            mine = NodeData(entry.key, 0, data.slots, 0, claim.label)
            multi = self._replacing(claim, handed, name, mine)
            await self.request(session, multi, until=until)
            entry.create_pending = False
            if multi.failed:
                return None
            entry.node = ClaimNode(f"{parent}/{name}", number, 0)
        return await self._took(at, entry.node, sent)

    async def _took(self, at: Attempt, node: ClaimNode, sent: float) -> Grant | None:
        """The grant of a node that has taken a hold over; ``None`` if it is gone."""
        session, entry, until = at.session, at.entry, at.until
        claim, check, read = entry.claim, Multi([Check(node.path)]), Read(node.path)
        await self.request(session, check, read, until=until)
        if read.error is not None:
            return None
        data, stat = read_data(read.value[0], self.where(claim.name)), read.value[1]
        node.token = token_of(claim.mode, data, stat)
        if claim.mode is not Mode.SLOTS and not await self._requeue_waiters(at, node):
            return None
        since = session.since(sent, node.session)
        if since == NEVER:
            raise BackendUnavailable(f"{self.store.display}: the session has just ended")
        return self._grant(entry, node, node.token, data.slots, since)

    async def _requeue_waiters(self, at: Attempt, mine: ClaimNode) -> bool:
        """Deletes the nodes that wait since before a take-over: they join again. Each is deleted
        only while the new hold is there, behind which it can only wait: else it may hold by now.
        False if the new hold is gone."""
        session, until = at.session, at.until
        for paths in filter(None, _portions(await self._waiting_behind(at))):
            reads = [Exists(path) for path in paths]
            await self.request(session, *reads, until=until)
            before = [
                Multi([Check(mine.path), Delete(path)])
                for path, read in zip(paths, reads, strict=True)
                if read.value is not None and read.value.czxid < mine.token
            ]
            if before:
                await self.request(session, *before, until=until)
            if any(isinstance(delete.value[0], NoNode) for delete in before):
                return False
        return True

    async def _waiting_behind(self, at: Attempt) -> list[str]:
        """The nodes that wait behind a hold, and whose tokens must be higher than its own: the
        tokens are the zxids of the nodes. Those of readers behind a reader need not be."""
        claim = at.entry.claim
        parent, listing = self.store.parent(claim.name), Listing(self.store.parent(claim.name))
        await self.request(at.session, listing, until=at.until)
        queue = NodeQueue(listing.value or (), self.where(claim.name))
        return [
            f"{parent}/{queued.node}"
            for queued in queue.claims[queue.admitted :]
            if Mode.EXCLUSIVE in (queued.mode, claim.mode)
        ]

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        entry = self.store.entries.pop(claim.owner, None)
        node = None if entry is None else entry.node
        if node is not None:
            node.end()
        key = entry.key if entry is not None else math.ceil(claim.ttl)
        known = self.store.sessions.get(key)
        if known is None or not known.used:
            return  # no request was ever sent
        # If this fails, the thread of the heartbeats retries for as long as the session exists.
        pending = self.store.pending_deletes.add(PendingDelete(key, claim, 0.0))
        session = await self.connected_session(key, until)
        parent = self.store.parent(claim.name)
        listing = Listing(parent)
        requests: list[Request] = [Sync(parent), listing]
        if node is not None and claim.mode is not Mode.SLOTS:
            requests.insert(0, Delete(node.path))
        await self.request(session, *requests, until=until)
        if listing.error is None:
            queue = NodeQueue(listing.value, self.where(claim.name))
            await self._delete(session, parent, queue.of_owner(digest(claim.owner)), until)
        self.store.pending_deletes.remove(pending)

    async def _delete(
        self,
        session: ZooKeeperSession,
        parent: str,
        queued_nodes: Sequence[QueuedNode],
        until: float | None = None,
    ) -> list[int]:
        """Deletes claims with the slots that they hold. Returns the tokens of the claims that
        existed."""
        tokens: list[int] = []
        for _ in range(TRIES):
            reads = [Read(f"{parent}/{queued.node}") for queued in queued_nodes]
            if not reads:
                break
            await self.request(session, *reads, until=until)
            ends: list[tuple[QueuedNode, int, Request]] = []
            for queued, read in zip(queued_nodes, reads, strict=True):
                if read.error is None:
                    data, stat = slots_to_end(read.value[0]), read.value[1]
                    end = deletion(parent, read.path, data.slots, stat.version)
                    ends.append((queued, token_of(queued.mode, data, stat), end))
            if ends:
                await self.request(session, *(end for _, _, end in ends), until=until)
            tokens += [token for _, token, end in ends if _succeeded(end)]
            queued_nodes = [queued for queued, _, end in ends if _was_modified(end)]
        return tokens

    async def revoke(self, name: str) -> list[int]:
        session = await self.any_session()
        parent = self.store.parent(name)
        listing = Listing(parent)
        await self.request(session, Sync(parent), listing)
        if listing.error is not None:
            return []
        queue = NodeQueue(listing.value, self.where(name))
        return await self._delete(session, parent, queue.claims[: queue.admitted])

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        try:
            return await self._exchange(grant, claim)
        finally:
            self.store.releasing.pop(grant.claim.owner, None)

    async def _exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        key, deletes = self._release_requests(grant)
        # The thread of a known claim may have got and released the lock by now: a new node would
        # have no owner. So no new node is made for a known claim; if it still waits, its own thread
        # makes one.
        known = self.store.entries.get(claim.owner)
        entry = known or self.store.entry(claim, self.runtime.now())
        session, before = await self.connected_session(key), deletes
        if entry.key != key:
            if deletes:
                await self.request(session, *deletes)
            session, before = await self.connected_session(entry.key), []
        answer = await self._attempt(Attempt(session, entry, True, None, known is None), *before)
        return bool(deletes) and _succeeded(deletes[0]), answer

    # Renewing

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        answer = _RenewResult()
        batches = await self._group_by_session(grants, waits, answer, until)
        batches.sort(key=lambda batch: not batch.session.up)
        # To all sessions at once: a session without connection must not delay the others.
        for batch in batches:
            if batch.session.up:
                self._start(batch)
        for batch in batches:
            try:
                await self._renew(batch, answer, until)
            except BackendUnavailable as error:
                claims = [each.claim for each in batch.grants]
                claims += [waiting.claim for waiting, _, _ in batch.waits]
                answer.unknown |= {claim.owner: str(error) for claim in claims}
        return answer.renewal()

    async def _group_by_session(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], answer: _RenewResult, until: float
    ) -> list[_RenewBatch]:
        """One batch per session. Claims known to be gone go into ``answer`` without a request."""
        batches: dict[int, _RenewBatch] = {}
        for grant in grants:
            entry = await self._held_entry(grant, answer, until)
            if entry is not None and entry.node is not None:
                batch = self._batch(batches, entry)
                batch.grants.append(grant)
                batch.held.append(entry.node)
        for waiting in waits:
            found = self.store.entries.get(waiting.claim.owner)
            node = None if found is None else found.node
            if found is None or node is None or node.ended:
                answer.forgotten.add(waiting.claim.owner)
            else:
                self._batch(batches, found).waits.append((waiting, found, node))
        return list(batches.values())

    def _batch(self, batches: dict[int, _RenewBatch], entry: ZooKeeperEntry) -> _RenewBatch:
        if entry.key not in batches:
            batches[entry.key] = _RenewBatch(entry.key, self.store.session(entry.key))
        return batches[entry.key]

    async def _held_entry(
        self, grant: Grant, answer: _RenewResult, until: float
    ) -> ZooKeeperEntry | None:
        """The entry of a hold, moved to a longer session if its ttl has grown. ``None`` if the hold
        is lost, or its state unknown; ``answer`` says which."""
        owner = grant.claim.owner
        entry = self.store.entries.get(owner)
        node = None if entry is None else entry.node
        if entry is None or node is None or node.grant is None:
            answer.lost[owner] = NODE_GONE
            return None
        try:
            if node.moving_to:
                await self._find_session(entry, node, until)
            if grant.claim.ttl > entry.key:
                await self._move(entry, node, grant, until)
        except BackendUnavailable as error:
            answer.unknown[owner] = str(error)
            return None
        session = self.store.sessions.get(entry.key)
        if session is None or session.id != node.session:
            answer.lost[owner] = SESSION_ENDED
            node.end()
            self.store.entries.pop(owner, None)
            return None
        return entry

    def _start(self, batch: _RenewBatch) -> None:
        batch.sent, batch.number = self.runtime.now(), batch.session.id
        batch.completion = self._completion()
        batch.checks = [(paths, Checks(paths)) for paths in _portions(batch.paths())]
        batch.session.start(batch.completion, *(check for _, check in batch.checks))

    async def _renew(self, batch: _RenewBatch, answer: _RenewResult, until: float) -> None:
        """Waits for the transactions that check all nodes of the batch, and evaluates them."""
        session = batch.session
        if batch.completion is None:
            await self.connected_session(batch.key, until)
            self._start(batch)
        assert batch.completion is not None
        checks = [check for _, check in batch.checks]
        await session.finish(batch.completion, self._seconds_left(until), *checks)
        gone: set[str] = set()
        for paths, check in batch.checks:
            if check.failed:
                gone |= await self._missing_nodes(session, paths, until)
        since = session.since(batch.sent, batch.number)
        if since != NEVER:
            answer.starts.append(since)
        for grant, node in zip(batch.grants, batch.held, strict=True):
            self._note_renewal(session, grant, node, since, gone, answer)
        await self._refresh(session, batch.waits, gone, answer.forgotten, until)

    def _note_renewal(
        self,
        session: ZooKeeperSession,
        grant: Grant,
        node: ClaimNode,
        since: float,
        gone: set[str],
        answer: _RenewResult,
    ) -> None:
        owner = grant.claim.owner
        if since == NEVER or session.id != node.session:
            answer.lost[owner] = SESSION_ENDED
        elif node.path in gone or not node.hold(grant, since + grant.claim.ttl):
            answer.lost[owner] = NODE_GONE  # deleted, or ended by another thread at this moment
        else:
            return
        node.end()
        self.store.entries.pop(owner, None)

    async def _missing_nodes(
        self, session: ZooKeeperSession, paths: list[str], until: float
    ) -> set[str]:
        """The paths without a node. The reads come behind the failed check, which was ordered by
        the majority: a node that they find existed at that time."""
        # The failed check names only the first missing node. It is not repeated without that one:
        # while many holds are released, each repetition would miss another.
        reads = [Exists(path) for path in paths]
        await self.request(session, *reads, until=until)
        return {path for path, read in zip(paths, reads, strict=True) if read.value is None}

    async def _refresh(
        self,
        session: ZooKeeperSession,
        waits: Sequence[tuple[Waiting, ZooKeeperEntry, ClaimNode]],
        gone: set[str],
        forgotten: set[str],
        until: float,
    ) -> None:
        """Notes that waiting claims are kept, and writes changed numbers of claims behind them."""
        writes: list[tuple[ClaimNode, Write]] = []
        for (claim, behind), entry, node in waits:
            if node.ended or node.path in gone or node.session != session.id:
                forgotten.add(claim.owner)
                continue
            entry.refreshed = self.runtime.now()
            if entry.behind != behind and node.grant is None and not entry.in_progress:
                # A write wakes the next waiter for nothing, so only a changed number is written.
                entry.behind = behind
                data = write_data(NodeData(entry.key, behind, (), 0, claim.label))
                # The node may list the claim's slots by the time of the write: keep those.
                version = node.version if claim.mode is Mode.SLOTS else ANY_VERSION
                writes.append((node, Write(node.path, data, version)))
        if writes:
            await self.request(session, *(write for _, write in writes), until=until)
        for node, write in writes:
            if write.error is None:
                node.version = write.value.version

    async def _move(
        self, entry: ZooKeeperEntry, node: ClaimNode, grant: Grant, until: float
    ) -> None:
        """Moves a hold to the session of a longer ttl, for ``extend(ttl=…)``. A hold that is gone
        stays where it was.

        A node can't change its session. So one transaction deletes the node and creates it again
        under the same name, which keeps its position in the queue. Its data keeps the token, since
        the zxid of the new node is higher."""
        claim = grant.claim
        session = await self.connected_session(math.ceil(claim.ttl), until)
        number = session.id
        data = NodeData(math.ceil(claim.ttl), 0, grant.slots, grant.token, claim.label)
        node.moving_to = math.ceil(claim.ttl)
        multi = self._replacing(claim, node.name, node.name, data)
        await self.request(session, multi, until=until)
        if session.id != number:
            raise BackendUnavailable(f"{self.store.display}: the session has just ended")
        if not multi.failed:
            entry.key, node.session = node.moving_to, number
        node.moving_to = 0

    async def _find_session(self, entry: ZooKeeperEntry, node: ClaimNode, until: float) -> None:
        """After an unanswered ``_move``: reads to which session the node belongs now."""
        session = await self.connected_session(entry.key, until)
        read = Read(node.path)
        await self.request(session, read, until=until)
        if read.error is None:
            owner = read.value[1].ephemeral_owner
            for key in (entry.key, node.moving_to):
                known = self.store.sessions.get(key)
                if known is not None and known.id == owner:
                    entry.key, node.session = key, owner
        node.moving_to = 0

    # Inspecting

    async def look(self, name: str) -> LockInfo:
        session = await self.any_session()
        listing = Listing(self.store.parent(name))
        await self.request(session, Sync(self.store.root), listing)
        (info,) = await self._lock_infos([name], [listing])
        if isinstance(info, Incompatible):
            raise info
        return info

    async def look_at_holders(self, claim: Claim) -> LockInfo:
        """Reads the nodes that are admitted, and none that wait."""
        session, where = await self.any_session(), self.where(claim.name)
        parent = self.store.parent(claim.name)
        listing = Listing(parent)
        await self.request(session, Sync(parent), listing)
        queue = NodeQueue(listing.value or (), where)
        reads = [Read(f"{parent}/{p.node}") for p in queue.claims[: min(queue.admitted, FEW_SHOWN)]]
        if reads:
            await self.request(session, *reads)
        info = read_lock_info(claim.name, queue, reads, where)
        if isinstance(info, Incompatible):
            raise info
        return info

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        session = await self.any_session()
        listing = Listing(self.store.locks_path())
        await self.request(session, Sync(self.store.root), listing)
        found = sorted((decode_name(node), node) for node in listing.value or ())
        found = [each for each in found if each[0].startswith(prefix) and each[0] > (cursor or "")]
        page = found[:limit]
        names = [name for name, node in page if encode_name(name) == node]
        used = [shown_unreadable(node) for name, node in page if encode_name(name) != node]
        lists = [Listing(self.store.parent(name)) for name in names]
        if lists:
            await self.request(session, *lists)
        for name, info in zip(names, await self._lock_infos(names, lists), strict=True):
            if isinstance(info, Incompatible):
                used.append(shown_unreadable(encode_name(name), info))
            elif info.holders or info.waiters:
                used.append(info)
        return Page(used, page[-1][0] if len(found) > limit else None)

    async def _lock_infos(
        self, names: Sequence[str], lists: Sequence[Listing]
    ) -> list[LockInfo | Incompatible]:
        """Reads all nodes of all names in one round trip. A name that can't be read gives the
        error instead."""
        queues = [
            read_queue(found, self.where(name)) for name, found in zip(names, lists, strict=True)
        ]
        reads = [
            []
            if isinstance(queue, Incompatible)
            else [Read(f"{self.store.parent(name)}/{p.node}") for p in queue.claims[:MOST_SHOWN]]
            for name, queue in zip(names, queues, strict=True)
        ]
        if flat := [read for some in reads for read in some]:
            await self.request(await self.any_session(), *flat)
        return [
            queue
            if isinstance(queue, Incompatible)
            else read_lock_info(name, queue, some, self.where(name))
            for name, queue, some in zip(names, queues, reads, strict=True)
        ]

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        parent = self.store.parent(name)
        signal = self._new_wake_signal()
        try:
            session = await self.any_session()
            session.watch(parent, signal.set)
            try:
                if await self._highest_token(name) == seen:
                    listing = Listing(parent, watch=True)
                    await self.request(session, listing, until=until)
                    # A name that is not in use has no node to watch: it is polled.
                    end = until
                    if listing.error is not None:
                        end = self.runtime.now() + UNUSED_NAME_SECONDS
                    if listing.error is not None or await self._highest_token(name) == seen:
                        await self._wait_for(session, signal, min(until, end))
            finally:
                session.unwatch(parent, signal.set)
        except BackendUnavailable:
            pause = self.runtime.between(*NODE_WATCH_RETRY_SECONDS)
            await self.runtime.sleep(max(0.0, min(pause, until - self.runtime.now())))

    async def _highest_token(self, name: str) -> int | None:
        info = await self.look(name)
        return max((holder.token for holder in info.holders), default=None)

    async def probe(self) -> list[Finding]:
        session = await self.connected_session(0)
        await self.make_node(session, self.store.locks_path(), Persistent)
        floor = session.floor or 0.0
        findings = [
            Finding("connection", f"{self.store.display} answers and allows writes"),
            Finding("sessions", f"the shortest ttl is {max(1.0, floor):g} s"),
            tick_finding(self.store.options.tick, floor),
        ]
        try:
            await self.connected_session(USUAL_TTL)
        except Unsupported as error:
            findings.append(Finding("ttl", f"the default does not fit: {error}", "warning"))
        if len(self.store.options.hosts) < 3:
            detail = "the URL names fewer than three servers: the loss of one may stop all locks"
            findings.append(Finding("ensemble", detail, "warning"))
        if type(self.store.options.access) is Access:
            detail = "no user is set: every client that reaches the servers may change the nodes"
            findings.append(Finding("access", detail, "warning"))
        return findings

    # Records

    def _record_path(self, name: str) -> str:
        return f"{self.store.root}/records/{encode_name(name)}"

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        _, _, hold = grant.ref
        session = await self.any_session()
        path = self._record_path(grant.claim.name)
        data = write_record(grant.token, keep_seconds, value)
        change: Request = Write(path, data)
        for _ in range(TRIES):
            multi = Multi([Check(hold), change])
            await self.request(session, multi)
            if not multi.failed:
                await self._purge(session)
                return True
            if isinstance(multi.value[0], NoNode):
                return False
            if not isinstance(multi.value[1], NoNode):  # another client created it
                change = Write(path, data)
                continue
            if isinstance(change, Plain):
                await self.make_node(session, f"{self.store.root}/records", Persistent)
            change = Plain(path, data, self.store.acl)
        raise BackendUnavailable(f"{self.where(grant.claim.name)}: the record can't be written")

    async def recall(self, name: str) -> Record | None:
        session = await self.any_session()
        read = Read(self._record_path(name))
        # A session on another server wrote it: without the sync a job could run twice.
        await self.request(session, Sync(self.store.root), read)
        if read.error is not None:
            return None
        kept = read_record(read.value[0])
        if kept is None:
            raise unreadable(f"the record of {self.where(name)}")
        age = self._wall(session) - read.value[1].mtime / 1000
        if age >= kept.keep_seconds:
            await self.request(session, Delete(read.path, read.value[1].version))
            return None
        return Record(kept.value, kept.token, age)

    def _wall(self, session: ZooKeeperSession) -> float:
        """The servers' wall clock, from the creation time of the session's last node; our own
        clock if the session has not created any."""
        server_time, moment = session.clock
        if not server_time:
            return self.runtime.wall()
        return server_time + self.runtime.now() - moment

    async def _purge(self, session: ZooKeeperSession) -> None:
        """Deletes expired records, at most every ``PURGE_SECONDS``."""
        now = self.runtime.now()
        if now - self.store.records_purged < PURGE_SECONDS:
            return
        self.store.records_purged = now
        listing = Listing(f"{self.store.root}/records")
        await self.request(session, listing)
        names = [decode_name(node) for node in (listing.value or ())[:PURGED_AT_ONCE]]
        reads = [Read(self._record_path(name)) for name in names]
        if reads:
            await self.request(session, *reads)
        wall = self._wall(session)
        expired: list[Request] = []
        for read in reads:
            kept = read_record(read.value[0]) if read.error is None else None
            if kept is not None and wall - read.value[1].mtime / 1000 >= kept.keep_seconds:
                expired.append(Delete(read.path, read.value[1].version))
        if expired:
            await self.request(session, *expired)

    # Requests

    def where(self, name: str) -> str:
        """A lock name as shown in messages."""
        return f"{name!r} on {self.store.display}"

    async def connected_session(self, key: int, until: float | None = None) -> ZooKeeperSession:
        """The session for ttls of ``key`` seconds, connected; 0 for the session that holds nothing.
        Raises ``BackendUnavailable`` if connecting takes longer than a request may."""
        known = self.store.sessions.get(key)
        if known is not None and not known.dead and known.check_connection():
            return known
        session = self.store.session(key)
        if not session.up:
            deadline = self.runtime.now() + self.store.settings.request_seconds
            by = deadline if until is None else min(until, deadline)
            await session.open(self.runtime, self._world, by)
        return session

    async def any_session(self) -> ZooKeeperSession:
        """Any session, preferably a connected one: for requests that don't depend on its nodes."""
        for key, session in list(self.store.sessions.items()):
            if session.up:
                return await self.connected_session(key)
        return await self.connected_session(0)

    def _seconds_left(self, until: float | None) -> float:
        """How long a request may take, in seconds."""
        seconds = self.store.settings.request_seconds
        return seconds if until is None else min(seconds, until - self.runtime.now())

    async def request(
        self, session: ZooKeeperSession, *requests: Request, until: float | None = None
    ) -> None:
        """One round trip: sends the requests back to back and waits for all replies."""
        if self.runtime.blocking:
            session.request(self._seconds_left(until), requests)
            return
        completion = self._completion()
        session.start(completion, *requests)
        await session.finish(completion, self._seconds_left(until), *requests)

    def _new_wake_signal(self) -> WakeSignal:
        """A signal for ``_wait_for``."""
        return BlockingCompletion() if self.runtime.blocking else self.runtime.signal()

    async def _wait_for(self, session: ZooKeeperSession, wake: WakeSignal, until: float) -> None:
        """Waits until the signal is set, by an event of the session or by another thread."""
        connection = session.connection
        if connection is None or connection.over:
            return
        if isinstance(wake, BlockingCompletion):
            connection.wait(wake, until, reply=False)
            return
        self._attach(connection)
        await self.runtime.wait(cast("Signal", wake), until)

    async def make_node(
        self,
        session: ZooKeeperSession,
        path: str,
        leaf: type[Create] = Container,
        until: float | None = None,
    ) -> None:
        """Creates a node and its ancestors, where they are missing."""
        missing: list[Create] = [leaf(path, b"", self.store.acl)]
        paths = [path]
        for _ in range(DEEPEST_PATH):
            await self.request(session, missing[-1], until=until)
            error = missing[-1].error
            if isinstance(error, NoNode):
                paths.append(paths[-1].rpartition("/")[0])
                missing.append(Persistent(paths[-1], b"", self.store.acl))
                continue
            if error is not None and not isinstance(error, NodeExists):
                raise BackendUnavailable(f"{self.store.display} did not create {path!r}") from error
            missing.pop()
            paths.pop()
            if not missing:
                return
            missing[-1] = type(missing[-1])(paths[-1], b"", self.store.acl)
        raise BackendUnavailable(
            f"{self.store.display}: {path!r} was deleted several times while it was created"
        )

    # Closing

    def forget(self) -> None:
        self.store.forget()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._close_sessions(self.store.remove_backend(self))

    async def _close_sessions(self, sessions: Sequence[ZooKeeperSession]) -> None:
        """Ends sessions, and with them all their holds."""
        until = self.runtime.now() + CLOSE_SECONDS
        closing: list[tuple[ZooKeeperSession, Completion, Request]] = []
        for session in sessions:
            completion = self._completion()
            closing.append((session, completion, session.close(completion)))
        for session, completion, request in closing:
            with suppress(BackendUnavailable):
                await session.finish(completion, until - self.runtime.now(), request)
            session.disconnect()

"""The store and its backend: how ``consul://`` admits claims.

One transaction adds an entry to a name's queue and reads the queue. A Consul transaction has no
"else", so every claim is added first. An entry that fits when it is added holds at once. An entry
that does not fit waits, and becomes a hold by a later transaction of its own, which succeeds only
if no entry is in front of it any more.

A request without an answer may still reach Consul at any time. The request that undoes it also
changes the guard of its session, and every join checks the guard: a late join changes nothing.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import quote

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.admit import Share, free_slots
from holdfast.core.backoff import CONFLICT_SECONDS, NO_QUERY_POLL_SECONDS
from holdfast.core.contract import (
    QUEUE_CAP,
    Finding,
    Guarantee,
    Page,
    Renewal,
    Runtime,
    Settings,
    Waiting,
)
from holdfast.core.ordered import (
    AbsentWaiters,
    Entry,
    Verdict,
    escape,
    judge,
    shown_unreadable,
    unescape,
)
from holdfast.errors import BackendUnavailable, Incompatible, LimitMismatch, Unsupported
from holdfast.io.http import Reply
from holdfast.stores._consensus.hosts import Wire
from holdfast.stores._consensus.sessions import Attempt, Session, Sessions
from holdfast.stores._consensus.strict import DamagedAnswer, read_record
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import (
    READ,
    Agent,
    AgentEndpoint,
    SessionGone,
    TransactionRefused,
)
from holdfast.stores.consul.inspect import (
    SessionLimits,
    limits_finding,
    lock_info,
    servers_finding,
)
from holdfast.stores.consul.line import FIRST, Line, QueuedEntry
from holdfast.stores.consul.orphans import (
    DELAYED,
    LOCK_DELAY_POLL_SECONDS,
    delete_orphans,
    orphans_of,
)
from holdfast.stores.consul.requests import OPS
from holdfast.stores.consul.session import INFO, ConsulHold, Ref, RenewalBatch, SessionRenewer
from holdfast.stores.consul.wakeups import News, NoQueryFree, Target, Wakeups

__all__ = ["ConsulBackend", "ConsulStore"]

TRIES = 20
"""How often an attempt starts over because the queue changed under it."""
REVOKE_TRIES = 8
FULL_QUEUE_RETRY_SECONDS = 1.0
REMEMBERED_WAITERS = 10_000
REMEMBERED_HANDED = 1024
MOST_PERMITS = (OPS - 4) // 2
"""Each slot takes two operations of the one transaction that grants them."""
SWEEP_SHARE = 0.02
"""Of the writes of a record, the share that also looks for records whose time is over."""
SWEPT_RECORDS = 32
PROBE_TTL = 10.0


class ConsulStore:
    """One Consul datacenter, for one client: what its backends share."""

    guarantees = frozenset(Guarantee)
    longest_ttl = 86_400.0
    whole_seconds = True

    def __init__(
        self,
        endpoint: AgentEndpoint,
        settings: Settings,
        shortest_ttl: float,
        lock_delay: float = 0.0,
    ) -> None:
        self.display = endpoint.hosts.display
        self.endpoint, self.settings, self.shortest_ttl = endpoint, settings, shortest_ttl
        self.lock_delay = lock_delay
        """For how many seconds Consul keeps others out after a session of this client ends."""
        self.names = requests.Names(settings.namespace)
        self.sessions = Sessions()
        self.queued: dict[str, QueuedEntry] = {}
        """The waiting claims of this client, by owner."""
        self.waiting: dict[tuple[str, int], None] = {}
        """Entries of any client that did not fit when they were added, by key and order."""
        self.holds: dict[str, ConsulHold] = {}
        self.moved: dict[str, Ref] = {}
        """Holds that were bound to another session after their grant, by owner."""
        self.moving: dict[str, Ref] = {}
        """Where holds may be bound now, by owner: the request that binds them had no answer."""
        self.handed: dict[str, None] = {}
        """Owners of holds that this client has handed over: their keys are other clients' now."""
        self.taking: dict[str, tuple[Session, Claim]] = {}
        """By owner: the session, of its own, that a hold is being taken over with; and the claim of
        that hold, whose key stays the same."""
        self.backends: set[int] = set()
        """The ids of the open backends: the last one to close ends the sessions."""

    def backend(self, runtime: Runtime) -> ConsulBackend:
        return ConsulBackend(self, runtime)

    def remember_handed(self, owner: str) -> None:
        self.forget_claim(owner)
        self.handed[owner] = None
        while len(self.handed) > REMEMBERED_HANDED:
            self.handed.pop(next(iter(self.handed)), None)

    def remember_waiting(self, waiting: Iterable[tuple[str, int]]) -> None:
        """An entry that was once seen to wait is a hold only if a mark says so."""
        for entry in waiting:
            self.waiting[entry] = None
        while len(self.waiting) > REMEMBERED_WAITERS:
            self.waiting.pop(next(iter(self.waiting), ("", 0)), None)

    def forget_claim(self, owner: str) -> None:
        self.queued.pop(owner, None)
        self.holds.pop(owner, None)
        self.moved.pop(owner, None)
        self.moving.pop(owner, None)

    def ref_of(self, grant: Grant) -> Ref:
        """The key of a hold, and the session that it is bound to now."""
        return self.moved.get(grant.claim.owner) or Ref(*grant.ref)


class ConsulBackend:
    """Admits claims in one Consul datacenter."""

    def __init__(self, store: ConsulStore, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        wire = Wire[Reply](store.endpoint, store.settings.connections, runtime)
        self.agent = Agent(wire, store.endpoint)
        self.renewer = SessionRenewer(store, self.agent, runtime)
        self.wakeups = Wakeups(self.agent, store.settings.request_seconds, runtime)
        self._absent = AbsentWaiters()
        self._watches = count()
        store.backends.add(id(self))

    # Acquire.

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        if claim.weight > MOST_PERMITS:
            raise Unsupported(
                f"{claim.weight} permits of {claim.name!r}: one transaction of "
                f"{self.store.display} grants {MOST_PERMITS} at most"
            )
        for tries in range(TRIES):
            session = await self.renewer.session(claim.ttl, until)
            try:
                answer = await self._attempt(Attempt(claim, join, session, until))
            except SessionGone:
                self.store.sessions.ended(session.id)
                continue
            except DamagedAnswer:  # Consul may have received the request, or receive it later
                self.store.sessions.doubts[claim.owner] = session
                raise
            except Incompatible:
                if claim.owner not in self.store.holds:
                    await self.abandon(claim)  # its entry is in the queue already
                raise
            if answer is not None:
                return answer
            # Other clients changed the queue: pause, so that not all of them retry in step.
            low, high = CONFLICT_SECONDS
            await self.runtime.sleep(self.runtime.between(low, high * tries))
        raise BackendUnavailable(
            f"{self.store.display}: the queue of {claim.name!r} changed during each of "
            f"{TRIES} attempts"
        )

    async def _attempt(self, at: Attempt) -> Grant | Busy | None:
        """One try. ``None`` if the queue has changed: try again."""
        claim, owner = at.claim, at.claim.owner
        queued = self.store.queued.get(owner)
        if queued is not None:
            answer = await self._attempt_again(at, queued)
            if answer is not None:
                return answer
        known = queued is not None or owner in self.store.holds
        if known or owner in self.store.sessions.doubts:
            queue = await self.read_queue(claim.name, at.until)
            if any(entry.owner == owner for entry in queue):
                return await self._judge(at, queue)
            self.store.queued.pop(owner, None)
            self.store.holds.pop(owner, None)
        return await self._join(at)

    async def _attempt_again(self, at: Attempt, queued: QueuedEntry) -> Grant | Busy | None:
        """Decides for a claim that waits, by a few entries of the queue. ``None`` if these are not
        enough: then the whole queue is read."""
        claim, line = at.claim, queued.line
        if line.gone and line.blocking == (line.gone,):
            line.gone, last = "", line.gone
            if claim.mode is not Mode.SLOTS:
                return await self._enter(at, (last,))
        keys, read = self.store.names.of(claim.name), line.to_read()
        own_key = keys.entry(claim).decode()
        trees = [own_key, *read, *([keys.slots] if claim.mode is Mode.SLOTS else ())]
        body = requests.txn(*(requests.tree(requests.quotable(key)) for key in trees))
        rows = await self.agent.txn(body, line=READ, until=at.until)
        found = {e.key: e for e in requests.queue_of(rows, keys.prefix, self.store.waiting)}
        own = found.pop(own_key, None)
        if own is None or own.order != queued.order or own.session != at.session.id:
            return None
        front = [entry for entry in found.values() if entry.order < own.order]
        orphaned = any(not row.get("Session") for row in rows)
        if own.details.settled or orphaned or not line.update(read, front):
            return None
        if not line.blocking and claim.mode is not Mode.SLOTS:
            return await self._enter(at, ())
        taken = tuple(row["Key"] for row in rows if row["Key"].startswith(keys.slots))
        if not line.blocking:
            return await self._enter_slots(at, taken)
        absent, retry = self._absent.judge(
            line.absent(claim, found, len(taken)), self.runtime.now()
        )
        if absent is not None:
            await self._skip(absent, at.until)
            retry = 0.0
        place = len(line.ahead) - (claim.mode is not Mode.SLOTS)  # the first one holds
        return Busy(place, retry, _target(line, found))

    async def _enter_slots(self, at: Attempt, taken: tuple[str, ...]) -> Grant | Busy | None:
        """For the first waiter. ``taken`` has the keys of the slots that are taken."""
        claim, slots = at.claim, self.store.names.of(at.claim.name).slots
        used = Share(Mode.SLOTS, 0, tuple(int(key.removeprefix(slots)) for key in taken))
        free = free_slots(claim.weight, claim.limit, [used])
        if len(free) == claim.weight:
            return await self._enter(at, (), free)
        return Busy(0, None, Target(slots, 0, False, taken))

    async def read_queue(self, name: str, until: float | None = None) -> list[Entry]:
        """The holds and waiting claims of a name, in order, by a consistent read."""
        keys = self.store.names.of(name)
        body = requests.txn(requests.tree(keys.encoded))
        found = await self.agent.txn(body, line=READ, until=until)
        return requests.queue_of(found, keys.prefix, self.store.waiting)

    async def _join(self, at: Attempt) -> Grant | Busy | None:
        claim, _, session, until = at
        keys = self.store.names.of(claim.name)
        key = keys.entry(claim)
        value = requests.entry_value(claim, self.runtime.wall())
        body = requests.txn(
            self._guard(session),
            requests.lock(key, value, session.id),
            requests.tree(keys.encoded),
        )
        try:
            found = await self._send(at, body)
        except TransactionRefused as refused:
            if refused.delayed:  # the own entry is an orphan of an ended session
                return Busy(0, LOCK_DELAY_POLL_SECONDS, reason=DELAYED)
            await self._learn_guard(session, until)
            return None
        # The result of the lock comes before the tree. A check has a result only if its key exists.
        before = 1 if found[0]["Key"] == key.decode() else 2
        queue = requests.queue_of(found[before:], keys.prefix, self.store.waiting)
        own = next((entry for entry in queue if entry.owner == claim.owner), None)
        if own is None:
            raise self.agent.damaged("the entry that it has just made is missing")
        if own.held and claim.mode is not Mode.SLOTS:
            return self._granted(claim, session, own.changed, ())
        return await self._judge(at, queue)

    def _guard(self, session: Session) -> bytes:
        key = self.store.names.guard(session.id)
        if session.generation:
            return requests.same(key, session.generation)
        return requests.absent(key)

    async def _send(self, at: Attempt, body: bytes) -> list[dict[str, Any]]:
        try:
            return await self.agent.txn(body, until=at.until)
        except (TransactionRefused, SessionGone):
            raise
        except BaseException:  # the transaction may have been applied, or be applied later
            self.store.sessions.doubts[at.claim.owner] = at.session
            raise

    async def _learn_guard(self, session: Session, until: float | None) -> None:
        body = requests.txn(requests.get(self.store.names.guard(session.id)))
        try:
            found = await self.agent.txn(body, line=READ, until=until)
        except TransactionRefused:
            session.generation = 0
        else:
            session.generation = int(found[0]["ModifyIndex"])

    def _granted(self, claim: Claim, session: Session, token: int, slots: tuple[int, ...]) -> Grant:
        self.store.queued.pop(claim.owner, None)
        self.store.moved.pop(claim.owner, None)
        self.store.moving.pop(claim.owner, None)
        self.store.holds[claim.owner] = ConsulHold(token, slots)
        key = self.store.names.of(claim.name).entry(claim).decode()
        return Grant(claim, token, slots, session.since, Ref(key, session.id, session.ttl))

    async def _judge(self, at: Attempt, queue: list[Entry]) -> Grant | Busy | None:
        orphans = orphans_of(queue)
        if not orphans:
            return await self._decide(at, queue)
        if await self._delete_orphans(at, orphans):
            return None
        answer = await self._decide(at, queue)
        return answer._replace(reason=DELAYED) if isinstance(answer, Busy) else answer

    async def _decide(self, at: Attempt, queue: list[Entry]) -> Grant | Busy | None:
        claim, join, session, until = at
        try:
            verdict = judge(claim, queue, self.store.display)
        except LimitMismatch:
            await self.abandon(claim)
            raise
        own = verdict.own
        if own is None:
            return None
        hold = self._hold_of(claim, own)
        if own.session != session.id:
            longer = hold and await self.renewer.longer(own.session, claim.ttl, until)
            if longer is None:
                await self._rebind(at, own)
                return None
            session = longer
        if hold is not None:
            return self._granted(claim, session, *hold)
        if verdict.fits:
            return await self._enter(at, (), verdict.slots)
        self.store.remember_waiting((entry.key, entry.order) for entry in queue if not entry.held)
        absent, retry = self._absent.judge(verdict.absent, self.runtime.now())
        if absent is not None:
            await self._skip(absent, until)
            return None
        if join and verdict.place < QUEUE_CAP:
            return self._queued(claim, own, verdict, queue, retry)
        if not join and claim.owner in self.store.queued:
            return Busy(verdict.place, retry)
        await self.abandon(claim)
        reason = f"{QUEUE_CAP} already wait for {claim.name!r}" if join else ""
        return Busy(verdict.place, FULL_QUEUE_RETRY_SECONDS if join else retry, reason=reason)

    def _hold_of(self, claim: Claim, own: Entry) -> ConsulHold | None:
        """What the claim's entry holds; ``None`` if it waits."""
        held = self.store.holds.get(claim.owner)
        if held is not None and own.held and own.details.token == held.token:
            return held
        if own.details.settled:  # granted by a transaction whose answer was lost
            return ConsulHold(own.details.token, own.details.slots)
        return None

    def _queued(
        self, claim: Claim, own: Entry, verdict: Verdict, queue: list[Entry], retry: float | None
    ) -> Busy:
        """Remembers the claim's entry, and answers what it has to wait for."""
        ahead = [entry for entry in queue if entry.order < own.order]
        if orphans_of(ahead):  # Consul sends no notification when a lock-delay is over
            delay = LOCK_DELAY_POLL_SECONDS
            retry = delay if retry is None else min(retry, delay)
        line, details = Line(claim.mode, ahead), own.details
        self.store.queued[claim.owner] = QueuedEntry(
            own.order, own.changed, details.since, details.behind, line
        )
        if line.blocking:
            return Busy(verdict.place, retry, _target(line, {entry.key: entry for entry in ahead}))
        keys = self.store.names.of(claim.name)
        taken = (keys.slot(slot).decode() for entry in ahead for slot in entry.details.slots)
        return Busy(verdict.place, retry, Target(keys.slots, 0, False, tuple(taken)))

    async def _rebind(self, at: Attempt, own: Entry) -> None:
        """Binds the claim's entry to this session, whose certain time a grant would have."""
        claim, _, session, _ = at
        keys, details = self.store.names.of(claim.name), own.details
        token = details.token if own.held else 0
        value = requests.entry_value(claim, details.since, behind=details.behind, token=token)
        if own.held:
            move = requests.Move(own.session, session.id)
            body = requests.moving(keys, claim, value, details.slots, move)
        else:
            key = keys.entry(claim)
            change = requests.lock(key, value, session.id)
            body = requests.txn(requests.unlock(key, own.session), change)
        with suppress(TransactionRefused):  # the next try reads the queue again
            await self._send(at, body)

    async def _delete_orphans(self, at: Attempt, orphans: list[Entry]) -> bool:
        """Deletes the orphans of a queue. False while a lock-delay protects one of them."""
        if any(entry.owner == at.claim.owner for entry in orphans):
            await self.abandon(at.claim)
            return True
        keys = self.store.names.of(at.claim.name)
        return await delete_orphans(self.agent, keys, orphans, at.session.id, at.until)

    async def _enter(
        self, at: Attempt, front: tuple[str, ...], slots: tuple[int, ...] = ()
    ) -> Grant | None:
        """Makes the claim's entry a hold. ``None`` if a key in front, or of the slots, exists."""
        claim, _, session, _ = at
        keys = self.store.names.of(claim.name)
        ops = [requests.absent(name.encode()) for name in front]
        for number in slots:
            slot, owner = keys.slot(number), requests.plain(claim.owner)
            ops += [requests.absent(slot), requests.lock(slot, owner, session.id)]
        ops += self._marking(claim, session)
        try:
            answer = await self._send(at, requests.txn(*ops))
        except TransactionRefused:
            return None
        return self._granted(claim, session, int(answer[-1]["ModifyIndex"]), slots)

    def _marking(self, claim: Claim, session: Session) -> list[bytes]:
        """Marks an entry that still exists as a hold; the mark's index is the token."""
        key = self.store.names.of(claim.name).entry(claim)
        since = requests.plain(f"{self.runtime.wall():.3f}")
        return [
            requests.locked_by(key, session.id),
            requests.lock(requests.mark(key), since, session.id),
        ]

    async def _skip(self, absent: Entry, until: float | None) -> None:
        """Deletes the entry of a waiter that could hold and did not enter within its grace."""
        key = requests.quotable(absent.key)
        body = requests.txn(
            requests.absent(requests.mark(key)), requests.delete_same(key, absent.changed)
        )
        with suppress(TransactionRefused):  # it has entered
            await self.agent.txn(body, until=until)

    # Wait.

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        if busy.ref is None:  # nothing to query
            await self.wakeups.pause(until, NO_QUERY_POLL_SECONDS)
            return
        target = Target(*busy.ref)
        try:
            try:
                await self._wait_for(claim, target, until)
            except NoQueryFree:
                await self.wakeups.poll(claim.owner, target, until)
        except (BackendUnavailable, TransactionRefused):
            await self.wakeups.pause(until)

    async def _wait_for(self, claim: Claim, target: Target, until: float) -> None:
        """Queries the target until another attempt is useful."""
        index = target.seen
        query = partial(self.wakeups.query, claim.owner, target.prefix, keys=bool(target.taken))
        while (reply := await query(index, until)) is not None:
            news, queued = target.news(reply), self.store.queued.get(claim.owner)
            if news is News.OTHER or queued is None or reply.seen == index:
                return  # the same index: nothing has changed, and the wait is nearly over
            if news is News.GONE:
                queued.line.gone = target.prefix
                return
            if news is News.ENTERED:
                queued.line.entered(target.prefix)
                if claim.mode is Mode.SLOTS:
                    return
                target = target._replace(marked=True)
            # If Consul's indexes start over, so does the query.
            index = reply.seen if reply.seen >= index else 0

    def nudge(self, claim: Claim) -> None:
        self.wakeups.long_polls.nudge(claim.owner)

    # Renew and release.

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        return await RenewalBatch(self.renewer, until, shorten).renew(grants, waits)

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        queued = self.store.queued.get(claim.owner)
        session = self.store.sessions.current(claim.ttl)
        mine = Ref(*grant.ref).key
        if (
            queued is None
            or session is None
            or not session.fresh(self.runtime.now())
            or any(key != mine for key in queued.line.blocking)
            or grant.claim.owner in self.store.sessions.doubts
            or claim.mode is Mode.SLOTS
        ):
            return await self._release_and_attempt(grant, claim)
        # Only the hold was in front of the waiting entry, and none can be added in front of it.
        body = requests.txn(
            requests.get(mine.encode()),
            requests.delete(mine.encode()),
            requests.delete(requests.mark(mine.encode())),
            *self._marking(claim, session),
        )
        try:
            answer = await self._send(Attempt(claim, True, session, None), body)
        except (TransactionRefused, SessionGone):
            return await self._release_and_attempt(grant, claim)
        self.store.forget_claim(grant.claim.owner)
        return True, self._granted(claim, session, int(answer[-1]["ModifyIndex"]), ())

    async def _release_and_attempt(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        """A claim that is in the queue already is woken by the release. An attempt on its behalf
        could join again after the claim has been granted and released."""
        known = claim.owner in self.store.queued or claim.owner in self.store.holds
        was_ours = await self.release(grant)
        return was_ours, Busy(0) if known else await self.attempt(claim, join=True)

    # Hand-over.

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        claim, ref = grant.claim, self.store.ref_of(grant)
        await self._change_guard(claim, until)
        session = await self.renewer.new(claim.ttl, until)
        keys, since = self.store.names.of(claim.name), self.runtime.wall()
        value = requests.entry_value(claim, since, token=grant.token)
        move = requests.Move(ref.session, session.id)
        body = requests.moving(keys, claim, value, grant.slots, move)
        try:
            await self.agent.txn(body, until=until)
        except (TransactionRefused, SessionGone):
            return None
        self.store.remember_handed(claim.owner)
        self.store.sessions.doubts.pop(claim.owner, None)
        return (session.id,)

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        """Binds the hold to a session of its own, until the first renewal: the end of that session
        undoes it, whenever the request arrives. The key of the hold has the name of its first
        owner, so the new hold has that owner, too."""
        handed = requests.handed_ref(grant.ref)
        old = claim._replace(owner=requests.checked_owner(grant.claim.owner))
        session, _ = self.store.taking.get(claim.owner, (None, None))
        if session is None:
            session = await self.renewer.new(claim.ttl, until)
            while len(self.store.taking) > REMEMBERED_HANDED:
                self.store.taking.pop(next(iter(self.store.taking)), None)
            self.store.taking[claim.owner] = session, old
        try:
            taken = await self._take_over(grant, old, session, handed, until)
        except SessionGone:
            self.store.taking.pop(claim.owner, None)
            raise BackendUnavailable(f"{self.store.display}: a new session has ended") from None
        if taken is None:
            with suppress(BackendUnavailable):  # then it runs out
                await self.renewer.end(session.id, until)
            self.store.taking.pop(claim.owner, None)
        return taken

    async def _take_over(
        self, grant: Grant, old: Claim, session: Session, handed: str, until: float
    ) -> Grant | None:
        queue = await self.read_queue(old.name, until)
        entry = next((each for each in queue if each.owner == old.owner), None)
        if entry is None:
            return None
        hold = ConsulHold(entry.details.token, entry.details.slots)
        if entry.session == session.id:  # the reply of an earlier try was lost
            since = await self.renewer.keep_alive(session.id, until)
            if since is None:
                return None
            session.since = since
            return self._took(old, session, hold)
        fits = entry.mode is old.mode and entry.details.weight == old.weight
        if entry.session != handed or hold.token != grant.token or not fits:
            return None
        return await self._bind(old, session, handed, hold, until)

    async def _bind(
        self, old: Claim, session: Session, handed: str, hold: ConsulHold, until: float
    ) -> Grant | None:
        value = requests.entry_value(old, self.runtime.wall())
        keys, move = self.store.names.of(old.name), requests.Move(handed, session.id)
        body = requests.moving(keys, old, value, hold.slots, move)
        try:
            answer = await self.agent.txn(body, until=until)
        except TransactionRefused:
            return None
        # All keys of a transaction have the same index: the token is that of the new mark.
        return self._took(old, session, hold._replace(token=int(answer[-1]["ModifyIndex"])))

    def _took(self, old: Claim, session: Session, hold: ConsulHold) -> Grant:
        self.store.handed.pop(old.owner, None)
        taken = self._granted(old, session, *hold)
        # With a ttl of 0 it moves to the session of its ttl at the first renewal.
        return taken._replace(ref=Ref(*taken.ref)._replace(ttl=0))

    async def _abandon_taking(self, claim: Claim, until: float | None) -> None:
        session, old = self.store.taking[claim.owner]
        key = self.store.names.of(claim.name).entry(old)
        ends = map(requests.delete, (key, requests.mark(key)))
        try:
            body = requests.txn(requests.locked_by(key, session.id), *ends)
            await self.agent.txn(body, until=until)
        except TransactionRefused:  # it was not taken, or is another taker's
            pass
        else:
            if claim.mode is Mode.SLOTS:
                await self._delete_slots(old, until)
            self.store.forget_claim(old.owner)
        await self.renewer.end(session.id, until)
        self.store.taking.pop(claim.owner, None)

    async def release(self, grant: Grant) -> bool:
        claim, keys = grant.claim, self.store.names.of(grant.claim.name)
        if claim.owner in self.store.handed:
            return False
        await self._change_guard(claim)
        key = Ref(*grant.ref).key.encode()
        ends = [key, requests.mark(key), *map(keys.slot, grant.slots)]
        try:
            await self.agent.txn(requests.txn(requests.get(key), *map(requests.delete, ends)))
        except TransactionRefused:
            ours = False
        else:
            ours = True
        self._ended(claim)
        return ours

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        if claim.owner in self.store.taking:
            await self._abandon_taking(claim, until)
            return
        if claim.owner in self.store.handed:
            return
        key = self.store.names.of(claim.name).entry(claim)
        await self._change_guard(claim, until)
        ends = [key, requests.mark(key)]
        await self.agent.txn(requests.txn(*map(requests.delete, ends)), until=until)
        if claim.mode is Mode.SLOTS:
            await self._delete_slots(claim, until)
        self._ended(claim)

    def _ended(self, claim: Claim) -> None:
        self.store.forget_claim(claim.owner)
        self.store.sessions.doubts.pop(claim.owner, None)

    async def _change_guard(self, claim: Claim, until: float | None = None) -> None:
        """If a request for this claim may still reach Consul, makes Consul refuse it."""
        session = self.store.sessions.doubts.get(claim.owner)
        if session is None:
            return
        guard = self.store.names.guard(session.id)
        value = requests.plain(f"{self.runtime.now()}")  # only another value changes the index
        with suppress(SessionGone):  # then the entry is gone too, and late requests are refused
            body = requests.txn(requests.lock(guard, value, session.id))
            answer = await self.agent.txn(body, until=until)
            session.generation = int(answer[0]["ModifyIndex"])

    async def _delete_slots(self, claim: Claim, until: float | None) -> None:
        """Deletes the slots of an entry that is gone, so that it can take no others. A slot that
        it had may belong to another claim by now: only unchanged slots are deleted."""
        tree = requests.txn(requests.tree(self.store.names.of(claim.name).encoded))
        value = requests.plain(claim.owner).decode()
        for _ in range(TRIES):
            found = await self.agent.txn(tree, line=READ, until=until)
            ends = [
                requests.delete_same(requests.quotable(kv["Key"]), int(kv["ModifyIndex"]))
                for kv in found
                if kv["Value"] == value
            ]
            if not ends:
                return
            with suppress(TransactionRefused):
                await self.agent.txn(requests.txn(*ends), until=until)
                return

    async def revoke(self, name: str) -> list[int]:
        tokens: list[int] = []
        holders = [entry for entry in await self.read_queue(name) if entry.held]
        for _ in range(REVOKE_TRIES):
            changed = set()
            for entry in holders:
                try:
                    await self.agent.txn(self._deletion(name, entry))
                    tokens.append(entry.details.token)
                except TransactionRefused as refused:
                    if 0 not in refused.failed:  # else the entry is gone
                        changed.add(entry.owner)
            if not changed:
                break
            holders = [entry for entry in await self.read_queue(name) if entry.owner in changed]
        return tokens

    def _deletion(self, name: str, entry: Entry) -> bytes:
        """Deletes an entry that still exists, with its slots. An entry without a mark may be
        taking slots right now: the transaction is refused if it has a mark by then."""
        keys, key = self.store.names.of(name), requests.quotable(entry.key)
        mark = requests.mark(key)
        ends = [key, mark, *map(keys.slot, entry.details.slots)]
        as_seen = [] if entry.details.settled else [requests.absent(mark)]
        return requests.txn(requests.get(key), *as_seen, *map(requests.delete, ends))

    # Inspect.

    async def look(self, name: str) -> LockInfo:
        queue = await self.read_queue(name)
        return lock_info(name, queue, await self._limits(queue))

    async def look_at_holders(self, claim: Claim) -> LockInfo:
        """Reads the first entries only, if the claim waits for a lock."""
        queued = self.store.queued.get(claim.owner)
        first = () if queued is None else queued.line.ahead[:FIRST]
        if not first or claim.mode is Mode.SLOTS:
            return await self.look(claim.name)
        prefix = self.store.names.of(claim.name).prefix
        body = requests.txn(*(requests.tree(requests.quotable(key)) for key in first))
        rows = await self.agent.txn(body, line=READ)
        queue = requests.queue_of(rows, prefix, self.store.waiting)
        return lock_info(claim.name, queue, await self._limits(queue))

    async def _limits(self, queue: Iterable[Entry]) -> dict[str, SessionLimits]:
        """The limits of the sessions of all holders."""
        found: dict[str, SessionLimits] = {}
        for session in {entry.session for entry in queue if entry.held and entry.session}:
            info = await self.agent.ask_many(dict, INFO + quote(session).encode())
            limits = SessionLimits.read(info[0]) if info else None
            if limits is not None:
                found[session] = limits
        return found

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """Consul has no pages: all names are listed, and the entries of some are read."""
        path = quote(self.store.names.root + escape(prefix))
        line = f"GET /v1/kv/{path}?keys&separator=%2F&consistent".encode()
        found = await self.agent.ask_many(str, line)
        keys = sorted(key for key in found if key > (cursor or ""))
        infos: list[LockInfo] = []
        for start in range(0, min(limit, len(keys)), OPS):
            infos += await self._infos(keys[start : min(start + OPS, limit)])
        return Page(infos, keys[limit - 1] if len(keys) > limit else None)

    async def _infos(self, listed: list[str]) -> list[LockInfo]:
        root = self.store.names.root
        prefixes = [key for key in listed if requests.segment_of(key, root) is not None]
        foreign = [key[len(root) :].rstrip("/") for key in listed if key not in prefixes]
        infos = [shown_unreadable(segment) for segment in foreign]
        if not prefixes:
            return infos
        body = requests.txn(*(requests.tree(prefix.encode()) for prefix in prefixes))
        found = await self.agent.txn(body, line=READ)
        for prefix in prefixes:
            segment = prefix[len(root) : -1]
            own = (kv for kv in found if kv["Key"].startswith(prefix))
            try:
                queue = requests.queue_of(own, prefix)
                if queue:
                    limits = await self._limits(queue)
                    infos.append(lock_info(unescape(segment), queue, limits))
            except Incompatible as error:
                infos.append(shown_unreadable(segment, error))
        return infos

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        """Queries all keys of the name, from an index before they were read."""
        prefix = self.store.names.of(name).prefix
        watcher = f"watch {next(self._watches)}"
        try:
            first = await self.agent.wire.ask(requests.query(prefix, 0, 1, keys=True))
            tokens = [entry.details.token for entry in await self.read_queue(name) if entry.held]
            if max(tokens, default=None) == seen:
                index = max(1, first.seen)
                await self.wakeups.query(watcher, prefix, index, until, keys=True)
        except BackendUnavailable:
            await self.wakeups.pause(until)
        except NoQueryFree:
            await self.wakeups.pause(until, NO_QUERY_POLL_SECONDS)

    async def probe(self) -> list[Finding]:
        leader = await self.agent.ask(str, b"GET /v1/status/leader")
        if not leader:
            return [Finding("leader", "Consul knows no leader", "broken")]
        findings = [Finding("leader", "Consul has a leader")]
        peers = await self.agent.ask_many(str, b"GET /v1/status/peers")
        few = servers_finding(len(peers))
        if few is not None:
            findings.append(few)
        await self.read_queue("holdfast probe")
        findings.append(Finding("access", f"may read {self.store.names.root}"))
        session = await self.renewer.session(max(PROBE_TTL, self.store.shortest_ttl))
        detail = "sessions can be made; Consul ends them one to two ttls after their last renewal"
        findings.append(Finding("sessions", f"{detail} ({session.ttl} s)"))
        findings.append(limits_finding(self.store.shortest_ttl, self.store.lock_delay))
        return findings

    # Records.

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        """Checks the hold and writes the record in one transaction."""
        ref = self.store.ref_of(grant)
        fields = [requests.PROTOCOL, grant.token, self.runtime.wall(), keep_seconds, value]
        text = b64encode(json.dumps(fields).encode())
        try:
            await self.agent.txn(
                requests.txn(
                    requests.locked_by(ref.key.encode(), ref.session),
                    requests.write(self.store.names.record(grant.claim.name), text),
                )
            )
        except TransactionRefused:
            return False
        if self.runtime.between(0, 1) < SWEEP_SHARE:
            await self._sweep_records()
        return True

    async def _sweep_records(self) -> None:
        """Deletes some records whose time is over. Consul deletes only keys of sessions, and a
        record has none."""
        line = f"GET /v1/kv/{quote(self.store.names.records)}?keys".encode()
        keys = await self.agent.ask_many(str, line)
        start = int(self.runtime.between(0, max(0, len(keys) - SWEPT_RECORDS)))
        for key in keys[start : start + SWEPT_RECORDS]:
            with suppress(Incompatible):  # recall() of that name raises it
                await self._recall(requests.quotable(key), key)

    async def recall(self, name: str) -> Record | None:
        return await self._recall(self.store.names.record(name), name)

    async def _recall(self, key: bytes, name: str) -> Record | None:
        try:
            found = (await self.agent.txn(requests.txn(requests.get(key)), line=READ))[0]
        except TransactionRefused:
            return None
        stored = read_record(found["Value"], f"{name!r} on {self.store.display}")
        record = None if stored is None else stored.at(self.runtime.wall())
        if stored is not None and record is None:
            with suppress(TransactionRefused):  # a newer record has been written
                await self.agent.txn(requests.txn(requests.delete_same(key, found["ModifyIndex"])))
        return record

    # The end.

    def forget(self) -> None:
        store = self.store
        if store.sessions.forget_if_forked():
            for known in (store.queued, store.holds, store.moved, store.moving, store.taking):
                known.clear()
            store.handed.clear()
        self.renewer.forget()
        self.agent.wire.forget()
        self.wakeups.long_polls.forget()

    async def close(self) -> None:
        if id(self) in self.store.backends:
            self.store.backends.discard(id(self))
            if not self.store.backends:
                await self.renewer.end_all()
        self.wakeups.long_polls.close()
        await self.agent.wire.close()


def _target(line: Line, found: Mapping[str, Entry]) -> Target:
    """The entry to wait for, as it was found."""
    entry = found.get(line.watched)
    if entry is None:
        return Target(line.watched, 0, False)
    marked = entry.details.settled
    return Target(line.watched, entry.details.token if marked else entry.changed, marked)

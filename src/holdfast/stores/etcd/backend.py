"""The backend of ``etcd://``: one transaction takes a name or joins its queue.

Every claim has an entry, whose value says whether it is held. A waiter's entry becomes a hold by
the waiter's own next attempt, or by a direct grant. A waiter waits for the end of the one entry
ahead of it.

A request whose reply was lost may still arrive at any time. The request that undoes it also changes
the guard of its session, a key. Every attempt compares the guard's version, so the late request
changes nothing.

A direct grant: a claim that is granted after a wait reads the next waiter in the same request. Its
release deletes its own entry, marks the next waiter's entry as granted and writes the wake-up key
of that waiter's session, which its client watches, in one transaction. The next waiter then makes
sure with a linearizable read. It confirms the grant in its entry only at its first renewal (see
``session``). An unconfirmed grant is skipped after its grace, as is any waiter that could hold and
does not. So a waiter behind another waiter does not watch the entry ahead from the start. An entry
that ends without a wake-up (its lease ran out) is noticed by the watch that the waiter starts after
a moment.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.contract import (
    DIRECT_GRANT_SECONDS,
    QUEUE_CAP,
    REFRESH_SECONDS,
    Finding,
    Guarantee,
    Page,
    Renewal,
    Runtime,
    Settings,
    Waiting,
)
from holdfast.core.hold import certain_seconds
from holdfast.core.ordered import (
    AbsentWaiters,
    Entry,
    Verdict,
    escape,
    judge,
    lock_info,
    shown_unreadable,
    unescape,
)
from holdfast.errors import BackendUnavailable, Incompatible, LimitMismatch
from holdfast.stores._consensus.hosts import Hosts, Wire
from holdfast.stores._consensus.sessions import FRESH_SHARE, Attempt, Session, Sessions, whole
from holdfast.stores._consensus.strict import DamagedAnswer, read_record
from holdfast.stores.etcd import inspect, messages, requests
from holdfast.stores.etcd.calls import (
    DELETE,
    GRANT,
    RANGE,
    REVOKE,
    STATUS,
    TXN,
    Calls,
    Credentials,
    Endpoint,
    FinalRefusal,
    NoSpace,
    Reply,
    SessionGone,
)
from holdfast.stores.etcd.keys import KeyPool
from holdfast.stores.etcd.messages import KeyValue, RangeReply, TxnReply
from holdfast.stores.etcd.requests import NameKeys, Names
from holdfast.stores.etcd.session import (
    UNKNOWN_WAITER,
    Leases,
    NextWaiter,
    Ref,
    RenewalBatch,
    WaitingEntry,
    move_request,
)
from holdfast.stores.etcd.wakeups import Waits

__all__ = ["EtcdBackend", "EtcdStore"]

LONGEST_TTL = 9_000_000_000.0  # etcd's own
MOST_TRIES = 20
"""How often an attempt is repeated because other clients changed the entries of the name."""
CONFLICT_BACKOFF_SECONDS = 0.004
"""Upper bound of the jittered pause after such a conflict, for each try so far."""
QUEUE_FULL_RETRY_SECONDS = 1.0
QUEUE_EXPECTED_SECONDS = 0.05
"""How long after a direct grant an attempt of the same client only joins: the new holder is surely
there, and the request is shorter."""
SHORT_TTL = 3 * REFRESH_SECONDS
"""Below this, the renewer refreshes waiters too rarely to keep their lease alive."""
DELETES_PER_TXN = 100  # etcd allows 128


class EtcdStore:
    """One etcd cluster, for one client."""

    guarantees = frozenset(Guarantee)
    shortest_ttl = 2.0
    longest_ttl = LONGEST_TTL
    whole_seconds = True

    def __init__(self, hosts: Hosts, credentials: Credentials, settings: Settings) -> None:
        self.display = hosts.display
        self.hosts, self.credentials, self.settings = hosts, credentials, settings
        self.endpoint = Endpoint(hosts, credentials)
        self.names = Names(settings.namespace)
        self.sessions = Sessions()
        self.key_pool = KeyPool()
        self.waiting: dict[str, WaitingEntry] = {}
        """By owner: the entries of this client that wait."""
        self.direct_grants: set[str] = set()
        """Owners of direct grants that are not confirmed yet. Not a field of the waiting entries: a
        late reply to an attempt may replace such an entry."""
        self.taking: dict[str, Session] = {}
        """By owner: the session, of its own, that a hold is being taken over with."""
        self.backends: set[int] = set()
        """Ids of the open backends: the last one to close ends the sessions."""

    def backend(self, runtime: Runtime) -> EtcdBackend:
        return EtcdBackend(self, runtime)

    def key(self, claim: Claim) -> bytes:
        """The key of a claim's entry."""
        return self.names.of(claim.name).entry(claim, self.key_pool.of(claim))

    def judge(self, claim: Claim, entries: Sequence[Entry]) -> Verdict:
        """Judges the entries of a name for a claim. The owner of an entry is its key id."""
        return judge(claim._replace(owner=self.key_pool.of(claim)), entries, self.display)


class _Undecided:
    """What was read of a queue does not decide about a claim: all of it must be read."""


class EtcdBackend:
    """Admits claims in one etcd cluster."""

    def __init__(self, store: EtcdStore, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        wire = Wire[Reply](store.endpoint, store.settings.connections, runtime)
        self.calls = Calls(wire, store.credentials, runtime)
        self.leases = Leases(store, self.calls, runtime)
        self._absent_waiters = AbsentWaiters()
        self.waits = Waits(store, self.calls, runtime, self._absent_waiters)
        self._watchers = count(1)
        """Numbers the watches of names, to tell them apart."""
        store.backends.add(id(self))

    # Attempts.

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        self.store.key_pool.allocate(claim)
        try:
            for tries in range(MOST_TRIES):
                session = self.leases.fresh(claim.ttl) or await self.leases.session(
                    claim.ttl, until
                )
                try:
                    answer = await self._attempt_once(Attempt(claim, join, session, until))
                except SessionGone:
                    self.store.sessions.ended(session.id)
                    continue
                except DamagedAnswer:  # etcd may have executed the request, or may do so later
                    self.store.sessions.doubts[claim.owner] = session
                    raise
                if answer is not None:
                    if not join and type(answer) is Busy:
                        self._refused(claim)
                    return answer
                # Other clients changed the entries. Jitter keeps them from colliding again.
                most = CONFLICT_BACKOFF_SECONDS * tries
                await self.runtime.sleep(self.runtime.between(0.0, most))
        except (LimitMismatch, Incompatible, FinalRefusal) as error:
            if join and isinstance(error, Incompatible) and claim.owner not in self.store.waiting:
                await self.abandon(claim)  # it has joined the queue already
            self.store.key_pool.quarantine(claim)
            raise
        raise BackendUnavailable(
            f"{self.store.display}: the queue of {claim.name!r} kept changing in {MOST_TRIES} tries"
        )

    def _refused(self, claim: Claim) -> None:
        """A claim was refused and has no entry: its key can be used again, unless a request of the
        claim may still arrive."""
        if claim.owner not in self.store.sessions.doubts:
            self.store.key_pool.recycle(claim)

    def _attempt_once(self, at: Attempt) -> Coroutine[Any, Any, Grant | Busy | None]:
        """Returns the coroutine of one attempt. Its result is None if the attempt must be
        repeated."""
        claim = at.claim
        keys, entry = self.store.names.of(claim.name), self.store.waiting.get(claim.owner)
        if entry is None and at.join and claim.mode is Mode.EXCLUSIVE:
            return self._join_queue(at, keys) if keys.contended else self._take(at, keys)
        return self._attempt_with_listing(at, keys, entry)

    async def _take(self, at: Attempt, keys: NameKeys) -> Grant | None:
        """A writer's first attempt at a name that is probably free; None if it is not."""
        claim, _, session, _ = at
        key = self.store.key(claim)
        held = requests.entry_value(claim, self.runtime.wall(), held=True)
        body = keys.take(self._guard(session), key, session.id, held)
        answer = await self._send(at, body)
        if answer.succeeded:
            return self._granted(claim, session, key, answer.revision, ())
        keys.contended = True
        return None

    async def _join_queue(self, at: Attempt, keys: NameKeys) -> Grant | Busy | None:
        """A writer's first attempt at a contended name; None to try again.

        One short request, because etcd is slower with long ones. A writer has to know only
        the last entry of the queue and the queue's length. The other entries are read only if it
        has to try again (``_attempt_with_listing``).
        """
        claim, _, session, _ = at
        key, since, guard = self.store.key(claim), self.runtime.wall(), self._guard(session)
        waiting = requests.entry_value(claim, since, held=False)
        if self.runtime.now() < keys.queue_expected_until:
            answer = await self._send(at, keys.join(guard, key, session.id, waiting))
            joined = answer.succeeded
        else:
            held = requests.entry_value(claim, since, held=True)
            body = keys.take_or_join(guard, key, session.id, held, waiting)
            answer = await self._send(at, body)
            if answer.succeeded:
                keys.contended = False
                return self._granted(claim, session, key, answer.revision, ())
            joined = answer.nested(1).succeeded
        if not joined:  # it has an entry already, or the name is in use as another kind
            return await self._attempt_with_listing(at, keys, None)
        return await self._joined(at, answer, (waiting, since))

    async def _joined(
        self, at: Attempt, answer: TxnReply, written: tuple[bytes, float]
    ) -> Busy | None:
        """The claim has joined the queue: returns the entry to wait for; None if no entry was
        ahead."""
        claim, session, store = at.claim, at.session, self.store
        keys, revision = store.names.of(claim.name), answer.revision
        found = answer.range(0)
        ahead = found.total
        if 1 < ahead <= QUEUE_CAP and found.kvs:  # the usual case: the entry ahead is a waiter's
            last = found.kvs[0]
            waits = requests.state_of(last, keys.prefix) == requests.WAITING
            store.waiting[claim.owner] = WaitingEntry(revision, *written, 0, None, ahead - 1)
            woken_session = session.id if waits and requests.is_writer(last.key) else ""
            target = last.key, last.create_revision
            return Busy(ahead - 1, None, (target, revision, woken_session))
        verdict = store.judge(claim, requests.entries_of(found.kvs, keys.prefix))
        store.waiting[claim.owner] = WaitingEntry(revision, *written, 0, verdict.target)
        if verdict.fits:
            keys.queue_expected_until = 0.0
            return None
        if ahead > 1:
            verdict = verdict._replace(place=ahead - 1, absent=())
        return await self._busy(at, verdict, session.id, revision)

    async def _attempt_with_listing(
        self, at: Attempt, keys: NameKeys, entry: WaitingEntry | None
    ) -> Grant | Busy | None:
        """An attempt that reads the entries of the name if the claim is not granted at once: those
        around the claim if it waits already, all if these do not decide."""
        if entry is not None:
            answer = await self._attempt_and_read(at, keys, entry, whole=False)
            if not isinstance(answer, _Undecided):
                return answer
        answer = await self._attempt_and_read(at, keys, entry, whole=True)
        assert not isinstance(answer, _Undecided)
        return answer

    async def _attempt_and_read(
        self, at: Attempt, keys: NameKeys, entry: WaitingEntry | None, *, whole: bool
    ) -> Grant | Busy | _Undecided | None:
        claim, join, session, _ = at
        key, since = self.store.key(claim), self.runtime.wall()
        guard = self._guard(session)
        slots = range(claim.weight) if claim.mode is Mode.SLOTS else ()
        held = requests.entry_value(claim, since, held=True, slots=slots)
        otherwise: list[bytes] = []
        # Joining doubles what etcd has to parse: it is in the request only if it may be needed.
        if keys.contended or entry is not None or not join:
            otherwise = [keys.listing]
            if entry is not None and not whole:
                otherwise = keys.around(claim, key, entry.order)
            if join:
                waiting = requests.entry_value(claim, since, held=False)
                entering = requests.put(key, waiting, session.id)
                joining = requests.nested([guard, *keys.joinable(claim, key)], [entering])
                otherwise.insert(0, joining)
        taking = [requests.put(key, held, session.id)]
        if entry is not None:
            taking.append(keys.next_after(entry.order))
        body = requests.txn([guard, *self._grantable(claim, key)], taking, otherwise)
        answer = await self._send(at, body)
        revision = answer.revision
        if answer.succeeded:
            if entry is None:
                keys.contended = False
                return self._granted(claim, session, key, revision, tuple(slots))
            next_waiter = _next_waiter(answer.range(1).kvs)
            return self._granted(claim, session, key, entry.order, tuple(slots), next_waiter)
        keys.contended = True
        if not otherwise:
            return None
        first = 1 if join else 0
        found = requests.merged(answer.range(n) for n in range(first, len(answer.parts)))
        return await self._judge(at, found, revision, whole=whole)

    def _grantable(self, claim: Claim, key: bytes) -> list[bytes]:
        """Compares: the claim can be granted at once."""
        keys = self.store.names.of(claim.name)
        entry = self.store.waiting.get(claim.owner)
        if entry is None:
            return keys.free_for(claim, key)
        if claim.mode is Mode.SLOTS:
            return [requests.never(key)]  # the free slots must be read first
        return keys.first_for(claim, key, entry.order)

    def _guard(self, session: Session) -> bytes:
        """Compares: the guard of the session has the version that we know."""
        key = self.store.names.guard(session.id)
        return requests.written(key, session.generation)

    async def _send(self, at: Attempt, body: bytes) -> TxnReply:
        """Sends a transaction of an attempt. If its outcome is unknown, the claim is marked for
        undo."""
        try:
            return await self.calls.call(TXN, body, at.until)
        except (SessionGone, NoSpace, FinalRefusal):  # nothing was changed
            raise
        except BaseException:  # etcd may have executed it, or may do so later
            self.store.sessions.doubts[at.claim.owner] = at.session
            raise

    def _granted(
        self,
        claim: Claim,
        session: Session,
        key: bytes,
        order: int,
        slots: tuple[int, ...],
        next_waiter: NextWaiter | None = None,
        token: int = 0,
    ) -> Grant:
        """Makes the grant. ``token`` is given where it is not the create revision."""
        self.store.waiting.pop(claim.owner, None)
        self.store.direct_grants.discard(claim.owner)
        if claim.mode is not Mode.EXCLUSIVE:
            next_waiter = None  # waiters behind readers or slots watch from the start
        ref = Ref(key.decode(), order, session.id, next_waiter)
        return Grant(claim, token or order, slots, session.since, ref)

    async def _judge(
        self, at: Attempt, found: list[KeyValue], revision: int, *, whole: bool
    ) -> Grant | Busy | _Undecided | None:
        """Decides what the entries that were read mean for the claim. Without the whole queue the
        only decision is that it still waits."""
        claim, join, session, until = at
        keys = self.store.names.of(claim.name)
        entries = requests.entries_of(found, keys.prefix)
        verdict = self.store.judge(claim, entries)
        own = verdict.own
        if not whole and (own is None or own.held or verdict.fits):
            return _Undecided()
        if own is not None and own.held:
            return await self._own_hold(at, own)
        if join and own is None:
            await self._read_guard(session, until)
            return None
        if verdict.fits:
            return await self._take_if_unchanged(at, verdict, revision)
        if own is not None:
            value = next(kv.value for kv in found if kv.key == own.key)
            ahead = [entry.key for entry in entries if entry.order < own.order]
            only_ahead = None if len(ahead) > 1 else "".join(ahead)
            since, behind = own.details.since, own.details.behind
            known = self.store.waiting.get(claim.owner)
            if not whole and known is not None and own not in requests.first_of(claim, entries):
                verdict = verdict._replace(place=known.place)
            entry = WaitingEntry(own.order, value, since, behind, only_ahead, verdict.place)
            self.store.waiting[claim.owner] = entry
        return await self._busy(at, verdict, "" if own is None else own.session, revision)

    async def _own_hold(self, at: Attempt, own: Entry) -> Grant | None:
        """The claim's own entry is a hold already: the reply to its grant was lost, or its ttl was
        changed since. The grant counts with the time of the session that the entry is bound to: one
        of a longer ttl; otherwise the entry is bound to the session of this attempt."""
        claim, _, session, until = at
        key, details = own.key.encode(), own.details
        if own.session != session.id:
            longer = await self.leases.longer(own.session, claim.ttl, until)
            if longer is not None:
                return self._granted(
                    claim, longer, key, own.order, details.slots, UNKNOWN_WAITER, details.token
                )
            value = requests.entry_value(
                claim, details.since, held=True, slots=details.slots, token=details.token
            )
            same = [self._guard(session), requests.changed_at(key, own.changed)]
            body = requests.txn(same, [requests.put(key, value, session.id)])
            if not (await self._send(at, body)).succeeded:
                await self._read_guard(session, until)
                return None
        return self._granted(
            claim, session, key, own.order, details.slots, UNKNOWN_WAITER, details.token
        )

    async def _busy(
        self, at: Attempt, verdict: Verdict, session: str, revision: int
    ) -> Busy | None:
        """Returns what to wait for; None if the entry ahead was skipped. ``session`` is that of the
        claim's own entry, "" if it has none."""
        claim = at.claim
        absent, retry = self._absent_waiters.judge(verdict.absent, self.runtime.now())
        if verdict.place and all(entry.given for entry in verdict.absent):
            retry = None  # only the next waiter checks that a direct grant is confirmed
        if absent is not None:
            await self._skip(claim.name, absent, at.until)
            return None
        if session and verdict.place >= QUEUE_CAP:
            await self.abandon(claim)
            reason = f"{QUEUE_CAP} wait for {claim.name!r}"
            return Busy(verdict.place, QUEUE_FULL_RETRY_SECONDS, reason=reason)
        woken_session = session if _wakes_directly(verdict.front, claim) else ""
        target = requests.identity_of(verdict.front)
        return Busy(verdict.place, retry, (target, revision, woken_session))

    async def _take_if_unchanged(
        self, at: Attempt, verdict: Verdict, revision: int
    ) -> Grant | None:
        """Takes what was free when the entries were read, if no entry has changed since."""
        claim, _, session, until = at
        keys = self.store.names.of(claim.name)
        key, order = self.store.key(claim), verdict.own.order if verdict.own else 0
        value = requests.entry_value(claim, self.runtime.wall(), held=True, slots=verdict.slots)
        same = requests.unchanged_since(keys.ends, revision)
        compare = [self._guard(session), same, requests.created_at(key, order)]
        body = requests.txn(compare, [requests.put(key, value, session.id)])
        answer = await self._send(at, body)
        if not answer.succeeded:
            await self._read_guard(session, until)
            return None
        granted_at = answer.revision
        if not order:
            return self._granted(claim, session, key, granted_at, verdict.slots)
        # Of two claims that fit, the later one may be granted, and released, before the other.
        token = granted_at if claim.mode is Mode.SLOTS else order
        return self._granted(claim, session, key, order, verdict.slots, UNKNOWN_WAITER, token)

    async def _read_guard(self, session: Session, until: float | None = None) -> None:
        """Reads the version of a session's guard."""
        guard = requests.only(self.store.names.guard(session.id))
        found = (await self.calls.call(RANGE, guard, until)).kvs
        session.generation = found[0].version if found else 0

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        pool = self.store.key_pool
        pool.pin(claim)
        granted = await self._exchange_at_once(grant, claim)
        answer: tuple[bool, Grant | Busy]
        if granted is not None:
            answer = True, granted
        elif pool.is_known(claim) or claim.owner in self.store.waiting:
            # The claim is in the queue and the release wakes it, or its own attempt was granted.
            # An attempt on its behalf could grant it once more after it has ended.
            answer = await self.release(grant), Busy(0)
        else:
            answer = await self.release(grant), await self.attempt(claim, join=True)
        pool.unpin(claim)
        return answer

    async def _exchange_at_once(self, grant: Grant, claim: Claim) -> Grant | None:
        """Releases the hold and grants the claim in one transaction, if only the hold is ahead of
        it. None if that is not possible."""
        entry, store = self.store.waiting.get(claim.owner), self.store
        session = store.sessions.current(claim.ttl)
        if (
            entry is None
            or session is None
            or not session.fresh(self.runtime.now())
            or entry.only_ahead not in ("", Ref(*grant.ref).key)
            or grant.claim.owner in store.sessions.doubts
            or claim.mode is Mode.SLOTS
        ):
            return None
        # No other entry was ahead of it, and none can have been added ahead since.
        mine, key = Ref(*grant.ref), store.key(claim)
        value = requests.entry_value(claim, self.runtime.wall(), held=True)
        compare = [
            self._guard(session),
            mine.exists(),
            requests.created_at(key, entry.order),
        ]
        changes = [requests.delete(mine.key.encode()), requests.put(key, value, session.id)]
        changes.append(store.names.of(claim.name).next_after(entry.order))
        body = requests.txn(compare, changes)
        try:
            answer = await self._send(Attempt(claim, True, session, None), body)
        except SessionGone:
            return None
        if not answer.succeeded:
            return None
        store.waiting.pop(grant.claim.owner, None)
        store.direct_grants.discard(grant.claim.owner)
        store.key_pool.recycle(grant.claim)
        next_waiter = _next_waiter(answer.range(2).kvs)
        return self._granted(claim, session, key, entry.order, (), next_waiter)

    async def release(self, grant: Grant) -> bool:
        store, claim, (key, order, _, next_waiter) = self.store, grant.claim, Ref(*grant.ref)
        store.taking.pop(claim.owner, None)
        store.waiting.pop(claim.owner, None)
        store.direct_grants.discard(claim.owner)
        if not store.key_pool.is_allocated(claim):
            return await self._delete_ended(grant)
        sure = claim.owner not in store.sessions.doubts
        ours = sure and next_waiter is not None and await self._grant_directly(grant, next_waiter)
        if not ours:
            ours = await self._delete(claim, key.encode(), None if next_waiter is None else order)
        if ours and sure:
            store.key_pool.recycle(claim)
        else:
            store.key_pool.quarantine(claim)
        return ours

    async def _delete_ended(self, grant: Grant) -> bool:
        """Deletes a hold that has ended already, as far as we know: its key may be recycled by
        now."""
        ref = Ref(*grant.ref)
        body = requests.txn([ref.exists()], [requests.delete(ref.key.encode())])
        return bool((await self.calls.call(TXN, body)).succeeded)

    async def _grant_directly(self, grant: Grant, next_waiter: NextWaiter) -> bool:
        """Ends a hold and grants the name to the next waiter. False, and nothing is changed, if the
        hold is gone or the next waiter's entry has changed."""
        if next_waiter == UNKNOWN_WAITER:
            return False
        try:
            answer = await self.calls.call(TXN, self._direct_grant_request(grant, next_waiter))
        except (SessionGone, NoSpace, ValueError):
            # The waiter's lease ended, there is no space for the wake-up, or its entry is of
            # another version.
            return False
        if not answer.succeeded:
            return False
        # An attempt right after this one will find the new holder there.
        keys = self.store.names.of(grant.claim.name)
        keys.queue_expected_until = self.runtime.now() + QUEUE_EXPECTED_SECONDS
        return True

    def _direct_grant_request(self, grant: Grant, next_waiter: NextWaiter) -> bytes:
        ref, next_key = Ref(*grant.ref), next_waiter.key.encode()
        wakeup_key = self.store.names.wakeup_key(next_waiter.session)
        return requests.txn(
            [ref.exists(), requests.changed_at(next_key, next_waiter.changed)],
            [
                requests.delete(ref.key.encode()),
                requests.change(next_key, requests.granted_value(next_waiter.value)),
                requests.wake(wakeup_key, requests.key_id_of(next_waiter.key), next_waiter.session),
            ],
        )

    # Hand-over.

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        store, claim, ref = self.store, grant.claim, Ref(*grant.ref)
        doubtful = store.sessions.doubts.get(claim.owner)
        if doubtful is not None:  # an attempt of before its grant may still arrive
            await self._change_guard(doubtful, until)
            store.sessions.doubts.pop(claim.owner, None)
        key = requests.only(ref.key.encode())
        kvs = (await self.calls.call(RANGE, key, until)).kvs
        if not kvs or kvs[0].create_revision != ref.order:
            return None
        session = await self.leases.new(claim.ttl, until)
        body = requests.txn([], [move_request(grant, session, kvs[0])])
        try:
            answer = await self.calls.call(TXN, body, until)
        except SessionGone:
            raise BackendUnavailable(f"{self.store.display}: a new lease ended at once") from None
        if not answer.nested(0).succeeded:
            return None
        store.taking.pop(claim.owner, None)
        store.waiting.pop(claim.owner, None)
        store.direct_grants.discard(claim.owner)
        store.key_pool.quarantine(claim)
        return requests.key_id_of(ref.key), ref.order, answer.revision

    async def _change_guard(self, session: Session, until: float) -> None:
        """Makes requests of a session void that may still arrive."""
        guard = requests.put(self.store.names.guard(session.id), b"", session.id)
        with suppress(SessionGone):  # then they are refused
            await self.calls.call(TXN, requests.txn([], [guard]), until)
            await self._read_guard(session, until)

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        """Binds the hold to a session of its own, until the first renewal: the end of that session
        undoes it, whenever the request arrives."""
        key_id, order, _ = handed = requests.handed_ref(grant.ref)
        keys = self.store.names.of(claim.name)
        old = keys.entry(claim, key_id)
        session = self.store.taking.get(claim.owner)
        if session is not None:
            taken = await self._taken_before(claim, session, (old, order), until)
            if taken is not None:
                return taken
        if session is None:
            session = await self.leases.new(claim.ttl, until)
            self.store.taking[claim.owner] = session
        try:
            taken = await self._take_over(grant, claim, session, handed, until)
        except SessionGone:
            self.store.taking.pop(claim.owner, None)
            raise BackendUnavailable(f"{self.store.display}: a new lease ended at once") from None
        if taken is None:
            await self._end_lease(session.id)
            self.store.taking.pop(claim.owner, None)
            self.store.key_pool.quarantine(claim)
        return taken

    async def _take_over(
        self,
        grant: Grant,
        claim: Claim,
        session: Session,
        handed: tuple[str, int, int],
        until: float,
    ) -> Grant | None:
        key_id, order, changed = handed
        keys, slots = self.store.names.of(claim.name), claim.mode is Mode.SLOTS
        old = keys.entry(claim, key_id)
        kvs = (await self.calls.call(RANGE, requests.only(old), until)).kvs
        entry = next(iter(requests.entries_of(kvs, keys.prefix)), None)
        if entry is None or (entry.order, entry.changed) != (order, changed):
            return None
        details = entry.details
        if details.token != grant.token or details.weight != claim.weight:
            return None
        since = self.runtime.wall()
        value = requests.entry_value(claim, since, held=True, slots=details.slots)
        key, changes = old, [requests.put(old, value, session.id)]
        if not slots:
            self.store.key_pool.allocate(claim)
            key = self.store.key(claim)
            changes = keys.take_over(old, key, value, session.id)
        same = [requests.created_at(old, order), requests.changed_at(old, changed)]
        answer = await self.calls.call(TXN, requests.txn(same, changes), until)
        if not answer.succeeded:
            return None
        keys.contended = True
        return self._took(claim, session, key, answer.revision, order, details.slots)

    def _took(
        self,
        claim: Claim,
        session: Session,
        key: bytes,
        token: int,
        order: int,
        slots: tuple[int, ...],
    ) -> Grant:
        """The grant of a hold that was taken over. Slots keep their place, and the other modes
        begin with their new entry."""
        if claim.mode is Mode.SLOTS:
            self.store.key_pool.adopt(claim, requests.key_id_of(key.decode()))
        else:
            order = token
        return self._granted(claim, session, key, order, slots, UNKNOWN_WAITER, token)

    async def _taken_before(
        self, claim: Claim, session: Session, old: tuple[bytes, int], until: float
    ) -> Grant | None:
        """The grant of an earlier try whose reply was lost."""
        key, order = old
        if claim.mode is not Mode.SLOTS:
            key = self.store.key(claim)
        since = await self.leases.keep_alive(session.id, until)
        kvs = (await self.calls.call(RANGE, requests.only(key), until)).kvs
        if since is None or not kvs or kvs[0].lease != session.id:
            return None
        session.since = since
        (entry,) = requests.entries_of(kvs, self.store.names.of(claim.name).prefix)
        details = entry.details
        return self._took(claim, session, key, details.token, order, details.slots)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        taking = self.store.taking.get(claim.owner)
        if taking is not None:
            with suppress(SessionGone):
                await self.calls.call(REVOKE, messages.lease(taking.id), until)
            self.store.taking.pop(claim.owner, None)
        entry = self.store.waiting.pop(claim.owner, None)
        self.store.direct_grants.discard(claim.owner)
        order = None if entry is None else entry.order
        await self._delete(claim, self.store.key(claim), order, until)
        self.store.key_pool.quarantine(claim)

    async def _delete(
        self,
        claim: Claim,
        key: bytes,
        order: int | None,
        until: float | None = None,
    ) -> bool:
        """Deletes the entry of a claim; True if it was there. With ``order``, the create revision
        of an entry that waited, it also wakes the next waiter."""
        names, session = self.store.names, self.store.sessions.doubts.get(claim.owner)
        if session is not None:
            return await self._undo(claim, key, session, order, until)
        if order is None:
            return bool((await self.calls.call(DELETE, requests.only(key), until)).deleted)
        changes = [requests.delete(key), names.of(claim.name).next_after(order)]
        answer = await self.calls.call(TXN, requests.txn([], changes), until)
        await self._wake_found(claim.name, answer.range(1), until)
        return answer.deleted(0)

    async def _undo(
        self,
        claim: Claim,
        key: bytes,
        session: Session,
        order: int | None,
        until: float | None,
    ) -> bool:
        """Deletes the entry of a claim whose request may still arrive, and makes that request
        void."""
        doubts, names = self.store.sessions.doubts, self.store.names
        changes = [requests.delete(key), names.of(claim.name).next_after(order or 0)]
        guard = requests.put(names.guard(session.id), b"", session.id)
        try:
            answer = await self.calls.call(TXN, requests.txn([], [*changes, guard]), until)
        except SessionGone:
            # A late request for that lease is refused. But the claim may have sent another attempt
            # since, with another lease.
            answer = await self.calls.call(TXN, requests.txn([], changes), until)
        except NoSpace:
            # The entry can be deleted without space. The guard is changed when there is space
            # again: until then a late request is refused for the same reason.
            await self.calls.call(TXN, requests.txn([], changes), until)
            raise
        else:
            await self._read_guard(session, until)
        doubts.pop(claim.owner, None)
        await self._wake_found(claim.name, answer.range(1), until)
        return answer.deleted(0)

    async def _skip(self, name: str, absent: Entry, until: float | None) -> None:
        """Deletes the entry of a waiter that could hold the lock and did not take it within its
        grace."""
        key = absent.key.encode()
        same = requests.changed_at(key, absent.changed)
        changes = [requests.delete(key), self.store.names.of(name).next_after(absent.order)]
        answer = await self.calls.call(TXN, requests.txn([same], changes), until)
        if answer.succeeded:
            await self._wake_found(name, answer.range(1))

    async def _wake_first(self, name: str) -> None:
        """Wakes the first waiter of a name, if the name is not held."""
        first = self.store.names.of(name).next_after(0)
        answer = await self.calls.call(TXN, requests.txn([], [first]))
        await self._wake_found(name, answer.range(0))

    async def _wake_found(self, name: str, found: RangeReply, until: float | None = None) -> None:
        """Wakes the waiters in the reply to a range request."""
        names = self.store.names
        for first in requests.entries_of(found.kvs, names.of(name).prefix):
            if not first.given:
                wake = requests.wake(names.wakeup_key(first.session), first.owner, first.session)
                try:
                    await self.calls.call(TXN, requests.txn([], [wake]), until)
                except (SessionGone, BackendUnavailable):
                    return  # if the waiter is still there, its own watch finds out in a moment

    # Waiting and renewing.

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        if claim.ttl < SHORT_TTL:  # the wait ends in time for the next keep-alive
            session = await self.leases.session(claim.ttl, until)
            until = min(until, session.since + session.ttl * FRESH_SHARE)
        if await self.waits.wait(claim, busy, until):
            return await self._direct_grant(claim, until)
        return None

    async def _direct_grant(self, claim: Claim, until: float) -> Grant | None:
        """Returns the grant of a claim that was woken, by a linearizable read; None if it was not
        granted. The grant lasts as long as no other client can skip it, and no longer than its
        lease."""
        store = self.store
        entry, session = store.waiting.get(claim.owner), store.sessions.current(claim.ttl)
        if entry is None or session is None:
            return None
        left = session.since + certain_seconds(session.ttl) - self.runtime.now()
        keys = store.names.of(claim.name)
        # Only the claim's own entry and the next one are needed.
        found = (await self.calls.call(RANGE, keys.from_on(entry.order, 2), until)).kvs
        if not found:
            return None
        own, *behind = found
        if (
            requests.encoded(own.key) != store.key(claim)
            or own.create_revision != entry.order
            or own.lease != session.id
            or requests.state_of(own, keys.prefix) != requests.GRANTED
        ):
            return None
        store.direct_grants.add(claim.owner)
        ref = Ref(own.key, entry.order, session.id, _next_waiter(behind))
        return Grant(claim, entry.order, ref=ref, seconds=min(DIRECT_GRANT_SECONDS, left))

    def nudge(self, claim: Claim) -> None:
        self.waits.watches.nudge(self.store.key_pool.of(claim))

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        return await RenewalBatch(self.leases, until, shorten).run(grants, waits)

    # Inspection, records, watch, probe.

    async def _entries(self, name: str) -> list[Entry]:
        """The entries of all holders and waiters, in order of arrival, by a linearizable read."""
        keys = self.store.names.of(name)
        found = await self.calls.call(RANGE, keys.all)
        return requests.entries_of(found.kvs, keys.prefix)

    async def look(self, name: str) -> LockInfo:
        entries = await self._entries(name)
        return lock_info(name, entries, await self._lease_seconds(entries))

    async def look_at_holders(self, claim: Claim) -> LockInfo:
        """Reads the first entries of the queue only: the holders are among them."""
        keys = self.store.names.of(claim.name)
        found = await self.calls.call(RANGE, requests.oldest_entries(keys.all))
        entries = requests.entries_of(found.kvs, keys.prefix)
        return lock_info(claim.name, entries, await self._lease_seconds(entries))

    async def _lease_seconds(self, entries: Iterable[Entry]) -> dict[str, float]:
        """The seconds that are left of each session that has a hold."""
        sessions = {entry.session for entry in entries if entry.given}
        return {session: (await self.leases.time_to_live(session))[0] for session in sessions}

    async def revoke(self, name: str) -> list[int]:
        holders = [entry for entry in await self._entries(name) if entry.given]
        tokens: list[int] = []
        for start in range(0, len(holders), DELETES_PER_TXN):
            batch = holders[start : start + DELETES_PER_TXN]
            body = requests.txn([], [requests.delete_if_same(entry) for entry in batch])
            answer = await self.calls.call(TXN, body)
            answer.exactly(len(batch))
            for number, entry in enumerate(batch):
                if answer.nested(number).succeeded:
                    tokens.append(entry.details.token)
        if tokens:
            await self._wake_first(name)
        return tokens

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """Reads entries in the order of their keys, which keeps the entries of a name together."""
        body = inspect.survey_range(self.store.names, prefix, cursor)
        found = await self.calls.call(RANGE, body)
        groups, cursor = inspect.groups_of(found, self.store.names, limit)
        return Page([await self._lock_info(*group) for group in groups], cursor)

    async def _lock_info(self, segment: str, kvs: list[KeyValue] | None) -> LockInfo:
        """One name of a survey. ``kvs`` are its entries; None if the page does not have all of
        them."""
        name = unescape(segment)
        if escape(name) != segment:
            return shown_unreadable(segment)
        try:
            if kvs is None:
                return await self.look(name)
            entries = requests.entries_of(kvs, self.store.names.of(name).prefix)
            return lock_info(name, entries, await self._lease_seconds(entries))
        except Incompatible as error:
            return shown_unreadable(segment, error)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        """Writes a record bound to a lease of its own, in a transaction that checks the hold."""
        message = messages.grant_lease(max(1, whole(keep_seconds)))
        lease = (await self.calls.call(GRANT, message)).id
        try:
            answer = await self._write_record(grant, value, keep_seconds, lease)
        except SessionGone:
            raise BackendUnavailable(
                f"{self.store.display}: the record of {grant.claim.name!r} was written too late"
            ) from None
        except BackendUnavailable:
            await self._end_unused_lease(grant.claim.name, lease)
            raise
        if not answer.succeeded:
            await self._end_lease(lease)
            return False
        before = answer.put(0).before
        if before is not None:
            await self._end_lease(before.lease)
        return True

    async def _write_record(
        self, grant: Grant, value: str, keep_seconds: float, lease: str
    ) -> TxnReply:
        fields = [requests.PROTOCOL, grant.token, self.runtime.wall(), keep_seconds, value]
        key, data = self.store.names.record(grant.claim.name), json.dumps(fields).encode()
        keep = requests.put(key, data, lease, requests.WITH_PREVIOUS)
        return await self.calls.call(TXN, requests.txn([Ref(*grant.ref).exists()], [keep]))

    async def _end_unused_lease(self, name: str, lease: str) -> None:
        """Ends the lease of a record whose write was not answered, unless it was written. A write
        that arrives later is refused then, because its lease is gone."""
        key = requests.only(self.store.names.record(name))
        with suppress(BackendUnavailable):  # the lease ends by itself
            kvs = (await self.calls.call(RANGE, key)).kvs
            if not kvs or kvs[0].lease != lease:
                await self._end_lease(lease)

    async def _end_lease(self, lease: str) -> None:
        if lease == "0":
            return
        with suppress(BackendUnavailable, SessionGone):  # the lease ends by itself
            await self.calls.call(REVOKE, messages.lease(lease))

    async def recall(self, name: str) -> Record | None:
        key = requests.only(self.store.names.record(name))
        kvs = (await self.calls.call(RANGE, key)).kvs
        if not kvs:
            return None
        record = read_record(kvs[0].value, f"{name!r} on {self.store.display}")
        # A change of etcd's leader prolongs the lease, but not the record.
        return None if record is None else record.at(self.runtime.wall())

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        keys = self.store.names.of(name).all
        watcher = f"watch {next(self._watchers)}"
        try:
            found = await self.waits.start_watch(watcher, keys, False, until)
            if found is None:
                return
            try:
                given = [entry for entry in await self._entries(name) if entry.given]
                tokens = [entry.details.token for entry in given]
                if max(tokens, default=None) == seen:
                    await self.waits.wait_for_event(found, until)
            finally:
                await self.waits.watches.end(found)
        except BackendUnavailable:
            await self.waits.pause(until)

    async def probe(self) -> list[Finding]:
        store = self.store
        status = await self.calls.call(STATUS, b"")
        findings = [inspect.version_finding(status.version)]
        if findings[0].level == "broken":  # too old for the requests that follow
            return findings
        if not status.leader:
            findings.append(Finding("leader", "this etcd node knows no leader", "broken"))
        if status.errors:
            findings.append(Finding("alarms", "; ".join(status.errors), "broken"))
        await self._entries("holdfast probe")
        findings.append(Finding("access", f"keys below {store.names.root} can be read"))
        findings.append(await self._probe_watch())
        if len(store.hosts.hosts) == 1:
            detail = "the URL names one host: if that one fails, the store is unavailable"
            findings.append(Finding("hosts", detail, "warning"))
        return findings

    async def _probe_watch(self) -> Finding:
        until = self.runtime.now() + self.store.settings.request_seconds
        keys = self.store.names.of("holdfast probe").all
        found = await self.waits.start_watch("probe", keys, True, until)
        if found is None:
            return Finding("watch", "no watch could be opened: waiters poll", "warning")
        await self.waits.watches.end(found)
        return Finding("watch", "waiters are woken over one connection")

    # Fork and close.

    def forget(self) -> None:
        store = self.store
        if store.sessions.forget_if_forked():
            store.waiting.clear()
            store.direct_grants.clear()
            store.taking.clear()
            store.key_pool.clear()
        self.leases.forget()
        self.calls.forget()
        self.waits.watches.forget()

    async def close(self) -> None:
        if id(self) in self.store.backends:
            self.store.backends.discard(id(self))
            if not self.store.backends:
                await self.leases.end_all()
        self.waits.watches.close()
        await self.calls.wire.close()


def _next_waiter(found: Sequence[KeyValue]) -> NextWaiter | None:
    """Returns the first writer in a list of entries; None if there is none."""
    for kv in found:
        if requests.is_writer(kv.key):
            return NextWaiter(kv.key, kv.value, kv.mod_revision, kv.lease)
    return None


def _wakes_directly(ahead: Entry | None, claim: Claim) -> bool:
    """True if the entry ahead will read the claim's entry at its grant, and wake it at its
    release."""
    return ahead is not None and ahead.mode is claim.mode is Mode.EXCLUSIVE and not ahead.given

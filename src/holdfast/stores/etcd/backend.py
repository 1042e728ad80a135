"""How ``etcd://`` admits claims: one transaction to take a name or to join its line.

The entry of a hold says so; the entry of a waiter becomes a hold by its own next attempt, or by
the release of who was in front. A waiter waits for the end of the one entry in front of it. A
request whose answer was lost may still arrive at any time: what undoes it also moves its session's
guard, and every attempt compares the guard, so it arrives in vain.

A waiter behind another waiter does not watch it from the start: who is granted after a wait reads
along who comes next, and its release hands the name over to that one and writes its subscription,
a key that its client watches all the time. The heir makes sure with a linearizable read. It says in
its entry that it came only if it holds for longer than a moment (``session``); if it did not come,
others take its place from it as from any waiter that is let in and does not come.

Whatever leaves the line without calling (a lease that ran out) is noticed by the watch that every
wait begins a moment later.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

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
    Entry,
    Patience,
    Verdict,
    escape,
    judge,
    shown_unreadable,
    standing,
    unescape,
)
from holdfast.errors import BackendUnavailable, Incompatible, LimitMismatch, Unsupported
from holdfast.io.http import Servers
from holdfast.stores._consensus.sessions import FRESH_SHARE, Attempt, Session, Sessions, whole
from holdfast.stores._consensus.strict import DamagedAnswer, read_record
from holdfast.stores.etcd import inspect, requests
from holdfast.stores.etcd.gateway import Credentials, Gateway, NoSpace, SessionGone
from holdfast.stores.etcd.keys import Tags
from holdfast.stores.etcd.requests import NameKeys, Names
from holdfast.stores.etcd.session import (
    GRANT,
    RANGE,
    REVOKE,
    SOMEBODY,
    TXN,
    Heir,
    Leases,
    Place,
    Ref,
    RenewalBatch,
)
from holdfast.stores.etcd.wakeups import Waits

if TYPE_CHECKING:
    from holdfast.io.http import Http

__all__ = ["EtcdBackend", "EtcdStore"]

DELETE = b"POST /v3/kv/deleterange"
STATUS = b"POST /v3/maintenance/status"
VERSION = b"GET /version"
LONGEST_TTL = 9_000_000_000.0  # etcd's own
# How often an attempt starts over because the line changed under it.
TRIES = 20
STEP_ASIDE_SECONDS = 0.004
LINED_SECONDS = 0.05
"""For how long whoever was handed a name is taken to be still there, which saves asking."""
SHORT_TTL = 3 * REFRESH_SECONDS
DELETES_PER_TXN = 100  # etcd allows 128


class EtcdStore:
    """One etcd cluster, for one client."""

    guarantees = frozenset(Guarantee)
    shortest_ttl = 2.0
    longest_ttl = LONGEST_TTL
    whole_seconds = True

    def __init__(self, servers: Servers, credentials: Credentials, settings: Settings) -> None:
        self.display = servers.display
        self.servers, self.credentials, self.settings = servers, credentials, settings
        self.names = Names(settings.namespace)
        self.sessions = Sessions()
        self.tags = Tags()
        self.places: dict[str, Place] = {}
        """By owner: the claims of this client that stand in a line."""
        self.handed: set[str] = set()
        """Owners that were handed what they hold, whose entries do not say so yet. Apart from the
        places: an answer that comes late may write a place anew."""
        self.backends: set[int] = set()
        """Which backends are open: the last one to close ends the sessions."""

    def backend(self, runtime: Runtime) -> EtcdBackend:
        return EtcdBackend(self, runtime)

    def key(self, claim: Claim) -> bytes:
        """The key of a claim's entry."""
        return self.names.of(claim.name).entry(claim, self.tags.of(claim))

    def judge(self, claim: Claim, line: Sequence[Entry]) -> Verdict:
        """What a line means for a claim, which stands there by its tag."""
        return judge(claim._replace(owner=self.tags.of(claim)), line, self.display)


class EtcdBackend:
    """Admits claims in one etcd cluster."""

    def __init__(self, store: EtcdStore, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        self.gateway = Gateway(_http(store, runtime), store.credentials)
        self.leases = Leases(store, self.gateway, runtime)
        self.waits = Waits(store, self.gateway, runtime)
        self._patience = Patience()
        store.backends.add(id(self))

    # Taking and giving back.

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        self.store.tags.given(claim)
        try:
            for tries in range(TRIES):
                session = self.leases.fresh(claim.ttl) or await self.leases.session(
                    claim.ttl, until
                )
                try:
                    answer = await self._ask(Attempt(claim, join, session, until))
                except SessionGone:
                    self.store.sessions.ended(session.id)
                    continue
                except DamagedAnswer:  # etcd itself may have got the request, or get it later
                    self.store.sessions.doubts[claim.owner] = session
                    raise
                if answer is not None:
                    if not join and type(answer) is Busy:
                        self._left_none(claim)
                    return answer
                # Others changed the line meanwhile: not all of them again in step.
                await self.runtime.sleep(self.runtime.between(0.0, STEP_ASIDE_SECONDS * tries))
        except (LimitMismatch, Incompatible, Unsupported) as error:
            if join and isinstance(error, Incompatible) and claim.owner not in self.store.places:
                await self.abandon(claim)  # it has joined them already
            self.store.tags.retire(claim)
            raise
        raise BackendUnavailable(f"{self.store.display}: the line of {claim.name!r} never rests")

    def _left_none(self, claim: Claim) -> None:
        """It was refused, and has left no trace."""
        if claim.owner not in self.store.sessions.doubts:
            self.store.tags.free(claim)

    def _ask(self, at: Attempt) -> Coroutine[Any, Any, Grant | Busy | None]:
        """The answer, or ``None`` to look again."""
        claim = at.claim
        keys, place = self.store.names.of(claim.name), self.store.places.get(claim.owner)
        if place is None and at.join and claim.mode is Mode.EXCLUSIVE:
            return self._join_line(at, keys) if keys.crowded else self._take(at, keys)
        return self.consider(at, keys, place)

    async def _take(self, at: Attempt, keys: NameKeys) -> Grant | None:
        """A writer's first attempt at a name that should be free; ``None`` if it is not."""
        claim, _, session, _ = at
        key = self.store.key(claim)
        held = requests.entry_value(claim, self.runtime.wall(), held=True)
        body = keys.taking(self.guard(session), key, session.id, held)
        answer = await self.send(at, body)
        if answer.get("succeeded"):
            return self.granted(claim, session, key, int(answer["header"]["revision"]), ())
        keys.crowded = True
        return None

    async def _join_line(self, at: Attempt, keys: NameKeys) -> Grant | Busy | None:
        """A writer's first attempt at a name that others want too; ``None`` to look again."""
        claim, _, session, _ = at
        key, since, guard = self.store.key(claim), self.runtime.wall(), self.guard(session)
        waiting = requests.entry_value(claim, since, held=False)
        if self.runtime.now() < keys.lined_until:
            answer = await self.send(at, keys.joining(guard, key, session.id, waiting))
            joined = answer.get("succeeded")
        else:
            held = requests.entry_value(claim, since, held=True)
            body = keys.entering(guard, key, session.id, held, waiting)
            answer = await self.send(at, body)
            if answer.get("succeeded"):
                keys.crowded = False
                return self.granted(claim, session, key, int(answer["header"]["revision"]), ())
            joined = answer["responses"][1]["response_txn"].get("succeeded")
        if not joined:  # it stands there already, or must not
            return await self.consider(at, keys, None)
        return await self._stand(at, answer, (waiting, since))

    async def _stand(
        self, at: Attempt, answer: dict[str, Any], written: tuple[bytes, float]
    ) -> Busy | None:
        """Behind whom it stands now; ``None`` if nobody was there after all."""
        claim, session, store = at.claim, at.session, self.store
        keys, revision = store.names.of(claim.name), int(answer["header"]["revision"])
        found = answer["responses"][0]["response_range"]
        ahead = int(found.get("count", 0))
        if 1 < ahead <= QUEUE_CAP:  # as usual: whoever holds, it is not the one that is waited for
            last = found["kvs"][0]
            calls = requests.state_of(last, keys.prefix) == requests.WAITING
            store.places[claim.owner] = Place(revision, *written, 0, None)
            subscription = session.id if calls and requests.is_writer(last["key"]) else ""
            front = last["key"], int(last["create_revision"])
            return Busy(ahead - 1, None, (front, revision, subscription))
        verdict = store.judge(claim, requests.line_of(found, keys.prefix))
        store.places[claim.owner] = Place(revision, *written, 0, verdict.target)
        if verdict.fits:
            keys.lined_until = 0.0
            return None
        if ahead > 1:
            verdict = verdict._replace(place=ahead - 1, absent=())
        return await self.stay(at, verdict, session.id, revision)

    async def consider(
        self, at: Attempt, keys: NameKeys, place: Place | None
    ) -> Grant | Busy | None:
        """An attempt that reads the whole line where it is not granted at once."""
        claim, join, session, _ = at
        key, since = self.store.key(claim), self.runtime.wall()
        guard = self.guard(session)
        slots = range(claim.weight) if claim.mode is Mode.SLOTS else ()
        held = requests.entry_value(claim, since, held=True, slots=slots)
        otherwise: list[bytes] = []
        # Joining doubles what etcd has to read: it is asked for only where it may be needed.
        if keys.crowded or place is not None or not join:
            otherwise = [keys.listing]
            if join:
                waiting = requests.entry_value(claim, since, held=False)
                entering = requests.put(key, waiting, session.id)
                line = requests.nested([guard, *keys.joinable(claim, key)], [entering])
                otherwise.insert(0, line)
        taking = [requests.put(key, held, session.id)]
        if place is not None:
            taking.append(keys.next_after(place.order))
        body = requests.txn([guard, *self._free(claim, key)], taking, otherwise)
        answer = await self.send(at, body)
        revision = int(answer["header"]["revision"])
        if answer.get("succeeded"):
            if place is None:
                keys.crowded = False
                return self.granted(claim, session, key, revision, tuple(slots))
            heir = heir_of(answer["responses"][1]["response_range"].get("kvs", ()))
            return self.granted(claim, session, key, place.order, tuple(slots), heir)
        keys.crowded = True
        if not otherwise:
            return None
        found = answer["responses"][-1]["response_range"]
        return await self._judge(at, found, revision)

    def _free(self, claim: Claim, key: bytes) -> list[bytes]:
        """Holds if the claim can be granted at once."""
        keys = self.store.names.of(claim.name)
        place = self.store.places.get(claim.owner)
        if place is None:
            return keys.free_for(claim, key)
        if claim.mode is Mode.SLOTS:
            return [requests.never(key)]  # which slots are free must be read
        return keys.first_for(claim, key, place.order)

    def guard(self, session: Session) -> bytes:
        key = self.store.names.guard(session.id)
        return b'{"key":"%b","target":"VERSION","version":"%d"}' % (key, session.generation)

    async def send(self, at: Attempt, body: bytes) -> dict[str, Any]:
        try:
            return await self.gateway.post(TXN, body, at.until)
        except (SessionGone, NoSpace, Unsupported):  # nothing was changed
            raise
        except BaseException:  # it may have been carried out, or be so later
            self.store.sessions.doubts[at.claim.owner] = at.session
            raise

    def granted(
        self,
        claim: Claim,
        session: Session,
        key: bytes,
        order: int,
        slots: tuple[int, ...],
        heir: Heir | None = None,
        token: int = 0,
    ) -> Grant:
        """``token``, where it is not the order of arrival."""
        self.store.places.pop(claim.owner, None)
        self.store.handed.discard(claim.owner)
        if claim.mode is not Mode.EXCLUSIVE:
            heir = None  # whoever waits for readers or slots watches from the start
        ref = Ref(key.decode(), order, session.id, heir)
        return Grant(claim, token or order, slots, session.since, ref)

    async def _judge(
        self, at: Attempt, found: dict[str, Any], revision: int
    ) -> Grant | Busy | None:
        claim, join, session, until = at
        keys = self.store.names.of(claim.name)
        line = requests.line_of(found, keys.prefix)
        verdict = self.store.judge(claim, line)
        own = verdict.own
        if own is not None and own.held:
            return await self._found(at, own)
        if join and own is None:
            await self.learn_guard(session, until)
            return None
        if verdict.fits:
            return await self._settle(at, verdict, revision)
        if own is not None:
            value = next(kv["value"] for kv in found["kvs"] if kv["key"] == own.key).encode()
            ahead = [entry.key for entry in line if entry.order < own.order]
            front = None if len(ahead) > 1 else "".join(ahead)
            place = Place(own.order, value, own.details.since, own.details.behind, front)
            self.store.places[claim.owner] = place
        return await self.stay(at, verdict, "" if own is None else own.session, revision)

    async def _found(self, at: Attempt, own: Entry) -> Grant | None:
        """The own hold, whose answer was lost or whose ttl is another one now. It counts with the
        time of the session that it is bound to: of a longer ttl, or else of this one."""
        claim, _, session, until = at
        key, said = own.key.encode(), own.details
        if own.session != session.id:
            longer = await self.leases.longer(own.session, claim.ttl, until)
            if longer is not None:
                return self.granted(claim, longer, key, own.order, said.slots, SOMEBODY, said.token)
            value = requests.entry_value(
                claim, said.since, held=True, slots=said.slots, token=said.token
            )
            same = [self.guard(session), requests.changed_at(key, own.changed)]
            body = requests.txn(same, [requests.put(key, value, session.id)])
            if not (await self.send(at, body)).get("succeeded"):
                await self.learn_guard(session, until)
                return None
        return self.granted(claim, session, key, own.order, said.slots, SOMEBODY, said.token)

    async def stay(self, at: Attempt, verdict: Verdict, session: str, revision: int) -> Busy | None:
        """What to wait for, and with an entry bound to which session, if any; ``None`` if whoever
        was in the way is no longer."""
        claim = at.claim
        absent, retry = self._patience.judge(verdict.absent, self.runtime.now())
        if verdict.place and all(entry.given for entry in verdict.absent):
            retry = None  # that it came is for the next in line to see
        if absent is not None:
            await self._skip(claim.name, absent, at.until)
            return None
        if session and verdict.place >= QUEUE_CAP:
            await self.abandon(claim)
            return Busy(verdict.place, 1.0, reason=f"{QUEUE_CAP} wait for {claim.name!r}")
        subscription = session if _calls(verdict.front, claim) else ""
        return Busy(
            verdict.place, retry, (requests.place_of(verdict.front), revision, subscription)
        )

    async def _settle(self, at: Attempt, verdict: Verdict, revision: int) -> Grant | None:
        """Takes what was free when the line was read, if the line is still the same."""
        claim, _, session, until = at
        keys = self.store.names.of(claim.name)
        key, order = self.store.key(claim), verdict.own.order if verdict.own else 0
        value = requests.entry_value(claim, self.runtime.wall(), held=True, slots=verdict.slots)
        same = requests.unchanged_since(keys.all, revision)
        compare = [self.guard(session), same, requests.created_at(key, order)]
        body = requests.txn(compare, [requests.put(key, value, session.id)])
        answer = await self.send(at, body)
        if not answer.get("succeeded"):
            await self.learn_guard(session, until)
            return None
        settled = int(answer["header"]["revision"])
        if not order:
            return self.granted(claim, session, key, settled, verdict.slots)
        # Of two that fit, the one behind may be quicker, and be gone before the other comes.
        token = settled if claim.mode is Mode.SLOTS else order
        return self.granted(claim, session, key, order, verdict.slots, SOMEBODY, token)

    async def learn_guard(self, session: Session, until: float | None = None) -> None:
        body = b'{"key":"%b"}' % self.store.names.guard(session.id)
        found = (await self.gateway.post(RANGE, body, until)).get("kvs")
        session.generation = self.gateway.number(found[0], "version") if found else 0

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        tags = self.store.tags
        tags.lend(claim)
        granted = await self._pass_on(grant, claim)
        answer: tuple[bool, Grant | Busy]
        if granted is not None:
            answer = True, granted
        elif tags.knows(claim) or claim.owner in self.store.places:
            # It stands in line, and the release wakes it, or it has come by itself: asked for on
            # its behalf, it might be let in anew after it left.
            answer = await self.release(grant), Busy(0)
        else:
            answer = await self.release(grant), await self.attempt(claim, join=True)
        tags.give_back(claim)
        return answer

    async def _pass_on(self, grant: Grant, claim: Claim) -> Grant | None:
        """Exchanges one for the other in one step, if nobody else is in front."""
        place, store = self.store.places.get(claim.owner), self.store
        session = store.sessions.current(claim.ttl)
        if (
            place is None
            or session is None
            or not session.fresh(self.runtime.now())
            or place.front not in ("", Ref(*grant.ref).key)
            or grant.claim.owner in store.sessions.doubts
            or claim.mode is Mode.SLOTS
        ):
            return None
        # Nobody else was in front of it, and nobody can have come in front since.
        mine, key = Ref(*grant.ref), store.key(claim)
        value = requests.entry_value(claim, self.runtime.wall(), held=True)
        compare = [
            self.guard(session),
            mine.stands(),
            requests.created_at(key, place.order),
        ]
        changes = [requests.delete(mine.key.encode()), requests.put(key, value, session.id)]
        changes.append(store.names.of(claim.name).next_after(place.order))
        body = requests.txn(compare, changes)
        try:
            answer = await self.send(Attempt(claim, True, session, None), body)
        except SessionGone:
            return None
        if not answer.get("succeeded"):
            return None
        store.places.pop(grant.claim.owner, None)
        store.handed.discard(grant.claim.owner)
        store.tags.free(grant.claim)
        heir = heir_of(answer["responses"][2]["response_range"].get("kvs", ()))
        return self.granted(claim, session, key, place.order, (), heir)

    async def release(self, grant: Grant) -> bool:
        store, claim, (key, order, _, heir) = self.store, grant.claim, Ref(*grant.ref)
        store.places.pop(claim.owner, None)
        store.handed.discard(claim.owner)
        if not store.tags.has(claim):
            return await self._end_again(grant)
        sure = claim.owner not in store.sessions.doubts
        ours = sure and heir is not None and await self._hand_over(grant, heir)
        if not ours:
            ours = await self._delete(claim, key.encode(), None if heir is None else order)
        if ours and sure:
            store.tags.free(claim)
        else:
            store.tags.retire(claim)
        return ours

    async def _end_again(self, grant: Grant) -> bool:
        """Ends a hold that has ended before, as far as we know: its key may be another's by now."""
        ref = Ref(*grant.ref)
        body = requests.txn([ref.stands()], [requests.delete(ref.key.encode())])
        return bool((await self.gateway.post(TXN, body)).get("succeeded"))

    async def _hand_over(self, grant: Grant, heir: Heir) -> bool:
        """Ends a hold and gives the name to its heir, if it is ours and the heir still waits."""
        if heir == SOMEBODY:
            return False
        try:
            answer = await self.gateway.post(TXN, self._handing(grant, heir))
        except (SessionGone, NoSpace, ValueError):
            return False  # its lease ended, it can't be told, or its entry is of another version
        if not answer.get("succeeded"):
            return False
        # Who comes back at once finds it there.
        keys = self.store.names.of(grant.claim.name)
        keys.lined_until = self.runtime.now() + LINED_SECONDS
        return True

    def _handing(self, grant: Grant, heir: Heir) -> bytes:
        ref, next_key = Ref(*grant.ref), heir.key.encode()
        subscription = self.store.names.subscription(heir.session)
        return requests.txn(
            [ref.stands(), requests.changed_at(next_key, heir.changed)],
            [
                requests.delete(ref.key.encode()),
                requests.change(next_key, requests.handed_value(heir.value)),
                requests.wake(subscription, requests.tag_of(heir.key), heir.session),
            ],
        )

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        place = self.store.places.pop(claim.owner, None)
        self.store.handed.discard(claim.owner)
        order = None if place is None else place.order
        await self._delete(claim, self.store.key(claim), order, until)
        self.store.tags.retire(claim)

    async def _delete(
        self,
        claim: Claim,
        key: bytes,
        order: int | None,
        until: float | None = None,
    ) -> bool:
        """Calls who comes next, if the claim stands there since ``order`` and others knew it
        waits."""
        names, session = self.store.names, self.store.sessions.doubts.get(claim.owner)
        if session is not None:
            return await self._undo(claim, key, session, order, until)
        if order is None:
            answer = await self.gateway.post(DELETE, b'{"key":"%b"}' % key, until)
            return bool(answer.get("deleted"))
        changes = [requests.delete(key), names.of(claim.name).next_after(order)]
        answer = await self.gateway.post(TXN, requests.txn([], changes), until)
        await self._call(claim.name, answer["responses"][1], until)
        return bool(answer["responses"][0]["response_delete_range"].get("deleted"))

    async def _undo(
        self,
        claim: Claim,
        key: bytes,
        session: Session,
        order: int | None,
        until: float | None,
    ) -> bool:
        """The same for a claim with a request that may still arrive: what it may do is nothing."""
        doubts, names = self.store.sessions.doubts, self.store.names
        changes = [requests.delete(key), names.of(claim.name).next_after(order or 0)]
        guard = requests.put(names.guard(session.id), b"", session.id)
        try:
            answer = await self.gateway.post(TXN, requests.txn([], [*changes, guard]), until)
        except SessionGone:
            # What still comes for it comes in vain. The claim itself may have asked again since,
            # with another lease.
            answer = await self.gateway.post(TXN, requests.txn([], changes), until)
        except NoSpace:
            # What is there can be deleted. The guard is moved when there is space again: what still
            # comes is refused until then.
            await self.gateway.post(TXN, requests.txn([], changes), until)
            raise
        else:
            await self.learn_guard(session, until)
        doubts.pop(claim.owner, None)
        await self._call(claim.name, answer["responses"][1], until)
        return bool(answer["responses"][0]["response_delete_range"].get("deleted"))

    async def _skip(self, name: str, absent: Entry, until: float | None) -> None:
        """Takes its place from somebody who was let in and did not come."""
        key = absent.key.encode()
        same = requests.changed_at(key, absent.changed)
        changes = [requests.delete(key), self.store.names.of(name).next_after(absent.order)]
        answer = await self.gateway.post(TXN, requests.txn([same], changes), until)
        if answer.get("succeeded"):
            await self._call(name, answer["responses"][1])

    async def _call_first(self, name: str) -> None:
        """Calls whoever is first in line, if nobody holds."""
        first = self.store.names.of(name).next_after(0)
        answer = await self.gateway.post(TXN, requests.txn([], [first]))
        await self._call(name, answer["responses"][0])

    async def _call(self, name: str, reply: dict[str, Any], until: float | None = None) -> None:
        names = self.store.names
        for first in requests.line_of(reply["response_range"], names.of(name).prefix):
            if not first.given:
                wake = requests.wake(names.subscription(first.session), first.owner, first.session)
                try:
                    await self.gateway.post(TXN, requests.txn([], [wake]), until)
                except (SessionGone, BackendUnavailable):
                    return  # if it is still there, it looks by itself in a moment

    # Waiting and renewing.

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        if claim.ttl < SHORT_TTL:  # its lease must be kept alive more often than the renewer does
            session = await self.leases.session(claim.ttl, until)
            until = min(until, session.since + session.ttl * FRESH_SHARE)
        if await self.waits.wait(claim, busy, until):
            return await self._handed_to(claim, until)
        return None

    async def _handed_to(self, claim: Claim, until: float) -> Grant | None:
        """What was handed over to a claim that was called, by a linearizable read; it is for as
        long as nobody can have lost patience, and for the time that its lease has left."""
        store = self.store
        place, session = store.places.get(claim.owner), store.sessions.current(claim.ttl)
        if place is None or session is None:
            return None
        left = session.since + certain_seconds(session.ttl) - self.runtime.now()
        keys = store.names.of(claim.name)
        # Its own entry, and who comes next: nobody else is of interest.
        body = b"{%b}" % keys.from_on(place.order, 2)
        found = (await self.gateway.post(RANGE, body, until)).get("kvs", ())
        if not found:
            return None
        own, *behind = found
        if (
            own["key"].encode() != store.key(claim)
            or int(own["create_revision"]) != place.order
            or own.get("lease") != session.id
            or requests.state_of(own, keys.prefix) != requests.HANDED
        ):
            return None
        store.handed.add(claim.owner)
        ref = Ref(own["key"], place.order, session.id, heir_of(behind))
        return Grant(claim, place.order, ref=ref, seconds=min(DIRECT_GRANT_SECONDS, left))

    def nudge(self, claim: Claim) -> None:
        self.waits.watches.nudge(self.store.tags.of(claim))

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        return await RenewalBatch(self.leases, until, shorten).run(grants, waits)

    # Looking, records, watching, probing.

    async def _line(self, name: str) -> list[Entry]:
        """Everybody who holds or waits, in order, by a linearizable read."""
        keys = self.store.names.of(name)
        found = await self.gateway.post(RANGE, b"{%b}" % keys.all)
        return requests.line_of(found, keys.prefix)

    async def look(self, name: str) -> LockInfo:
        entries = await self._line(name)
        return standing(name, entries, await self._remaining(entries))

    async def _remaining(self, entries: Iterable[Entry]) -> dict[str, float]:
        sessions = {entry.session for entry in entries if entry.given}
        return {session: (await self.leases.time_to_live(session))[0] for session in sessions}

    async def revoke(self, name: str) -> list[int]:
        holders = [entry for entry in await self._line(name) if entry.given]
        tokens: list[int] = []
        for start in range(0, len(holders), DELETES_PER_TXN):
            batch = holders[start : start + DELETES_PER_TXN]
            body = requests.txn([], [requests.ending(entry) for entry in batch])
            answer = await self.gateway.post(TXN, body)
            replies = answer["responses"].exactly(len(batch))
            for entry, reply in zip(batch, replies, strict=True):
                if reply["response_txn"].get("succeeded"):
                    tokens.append(entry.details.token)
        if tokens:
            await self._call_first(name)
        return tokens

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """Reads entries in the order of their keys, which keeps those of a name together."""
        body = inspect.survey_range(self.store.names, prefix, cursor)
        found = await self.gateway.post(RANGE, body)
        groups, cursor = inspect.groups_of(found, self.store.names, limit)
        return Page([await self._shown(*group) for group in groups], cursor)

    async def _shown(self, segment: str, kvs: list[dict[str, Any]] | None) -> LockInfo:
        """One name of a survey; ``kvs`` are its entries, if all of them were read."""
        name = unescape(segment)
        if escape(name) != segment:
            return shown_unreadable(segment)
        try:
            if kvs is None:
                return await self.look(name)
            entries = requests.line_of({"kvs": kvs}, self.store.names.of(name).prefix)
            return standing(name, entries, await self._remaining(entries))
        except Incompatible as error:
            return shown_unreadable(segment, error)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        """A lease of its own ends the record; the hold is checked in the same transaction."""
        answer = await self.gateway.post(GRANT, b'{"TTL":"%d"}' % max(1, whole(keep_seconds)))
        lease: str = answer["ID"]
        fields = [requests.PROTOCOL, grant.token, self.runtime.wall(), keep_seconds, value]
        text = b64encode(json.dumps(fields).encode())
        mine = Ref(*grant.ref).stands()
        keep = b'{"request_put":{"key":"%b","value":"%b","lease":"%b","prev_kv":true}}' % (
            self.store.names.record(grant.claim.name),
            text,
            lease.encode(),
        )
        answer = await self.gateway.post(TXN, requests.txn([mine], [keep]))
        kept = bool(answer.get("succeeded"))
        before = answer["responses"][0]["response_put"].get("prev_kv", {}) if kept else {}
        await self._end_lease(before.get("lease", "0") if kept else lease)
        return kept

    async def _end_lease(self, lease: str) -> None:
        if lease == "0":
            return
        with suppress(BackendUnavailable, SessionGone):  # it ends by itself
            await self.gateway.post(REVOKE, b'{"ID":"%b"}' % lease.encode())

    async def recall(self, name: str) -> Record | None:
        body = b'{"key":"%b"}' % self.store.names.record(name)
        kvs = (await self.gateway.post(RANGE, body)).get("kvs")
        if not kvs:
            return None
        record = read_record(kvs[0].get("value"), f"{name!r} on {self.store.display}")
        # A lease lives longer when etcd changes its leader; the record does not.
        return None if record is None else record.at(self.runtime.wall())

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        keys = self.store.names.of(name).all.decode()
        watcher = f"watch {self.runtime.between(0, 1)}"
        try:
            found = await self.waits.confirmed(watcher, keys, False, until)
            if found is None:
                return
            try:
                given = [entry for entry in await self._line(name) if entry.given]
                tokens = [entry.details.token for entry in given]
                if max(tokens, default=None) == seen:
                    await self.waits.fired(found, until)
            finally:
                await self.waits.watches.end(found)
        except BackendUnavailable:
            await self.waits.pause(until)

    async def probe(self) -> list[Finding]:
        store = self.store
        reply = await self.gateway.http.ask(VERSION)
        findings = [inspect.version_finding(reply.body)]
        if findings[0].level == "broken":  # it has no gateway that we could ask for more
            return findings
        status = await self.gateway.post(STATUS, b"{}")
        if int(status.get("leader", 0)) == 0:
            findings.append(Finding("leader", "this etcd knows no leader", "broken"))
        if status.get("errors"):
            findings.append(Finding("alarms", "; ".join(status["errors"]), "broken"))
        await self._line("holdfast probe")
        findings.append(Finding("access", f"may read {store.names.root}"))
        findings.append(await self._watching())
        if len(store.servers.hosts) == 1:
            words = "one host is named: the locks are as available as that one"
            findings.append(Finding("hosts", words, "warning"))
        return findings

    async def _watching(self) -> Finding:
        until = self.runtime.now() + self.store.settings.request_seconds
        keys = self.store.names.of("holdfast probe").all.decode()
        found = await self.waits.confirmed("probe", keys, True, until)
        if found is None:
            return Finding("watch", "no watch could be opened: waiters only look again", "warning")
        await self.waits.watches.end(found)
        return Finding("watch", "waiters are woken over one WebSocket")

    # Ending.

    def forget(self) -> None:
        self.store.sessions.forget()
        self.store.places.clear()
        self.store.handed.clear()
        self.store.tags.clear()
        self.leases.forget()
        self.gateway.http.forget()
        self.waits.watches.forget()

    async def close(self) -> None:
        if id(self) in self.store.backends:
            self.store.backends.discard(id(self))
            if not self.store.backends:
                await self.leases.end_all()
        self.waits.watches.close()
        await self.gateway.http.close()


def heir_of(found: Sequence[dict[str, str]]) -> Heir | None:
    """Who comes next, by what was found behind a claim."""
    for kv in found:
        if requests.is_writer(kv["key"]):
            changed, session = int(kv["mod_revision"]), kv.get("lease", "0")
            return Heir(kv["key"], kv.get("value", ""), changed, session)
    return None


def _calls(front: Entry | None, claim: Claim) -> bool:
    """Whether who is in front will learn of the claim when it is granted, and call it."""
    return front is not None and front.mode is claim.mode is Mode.EXCLUSIVE and not front.given


def _http(store: EtcdStore, runtime: Runtime) -> Http:
    if runtime.blocking:
        from holdfast.io.http import BlockingHttp

        return BlockingHttp(store.servers, store.settings.connections)
    from holdfast.io.http_aio import AsyncHttp

    return AsyncHttp(store.servers, store.settings.connections)

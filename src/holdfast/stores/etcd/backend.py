"""How ``etcd://`` admits claims: one transaction to take a name or to join its line.

The entry of a hold says so; the entry of a waiter becomes a hold by its own next attempt, or by
the release of who was in front (``etcd_leave``). A waiter waits for the end of the one entry in
front of it. A request whose answer was lost may still arrive at any time: what undoes it also
moves its session's guard, and every attempt compares the guard, so it arrives in vain.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.contract import (
    QUEUE_CAP,
    REFRESH_SECONDS,
    Finding,
    Page,
    Renewal,
    Runtime,
    Waiting,
)
from holdfast.core.ordered import Entry, Patience, Verdict
from holdfast.errors import BackendUnavailable, Incompatible, LimitMismatch, Unsupported
from holdfast.stores._consensus.sessions import FRESH_SHARE, Attempt, Session
from holdfast.stores._consensus.strict import DamagedAnswer
from holdfast.stores.etcd import inspect as view
from holdfast.stores.etcd import leave, requests
from holdfast.stores.etcd.gateway import Gateway, NoSpace, SessionGone
from holdfast.stores.etcd.join import join_line, take
from holdfast.stores.etcd.renew import renew
from holdfast.stores.etcd.session import SOMEBODY, TXN, Heir, Leases, Place, Ref
from holdfast.stores.etcd.wait import Waits

if TYPE_CHECKING:
    from holdfast.io.http import Http
    from holdfast.stores.etcd.requests import NameKeys
    from holdfast.stores.etcd.store import EtcdStore

__all__ = ["EtcdBackend"]

RANGE = b"POST /v3/kv/range"
# How often an attempt starts over because the line changed under it.
TRIES = 20
STEP_ASIDE_SECONDS = 0.004
SHORT_TTL = 3 * REFRESH_SECONDS


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
            return join_line(self, at, keys) if keys.crowded else take(self, at, keys)
        return self.consider(at, keys, place)

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
            heir = leave.heir_of(answer["responses"][1]["response_range"].get("kvs", ()))
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
            await leave.skip(self, claim.name, absent, at.until)
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
        heir = leave.heir_of(answer["responses"][2]["response_range"].get("kvs", ()))
        return self.granted(claim, session, key, place.order, (), heir)

    async def release(self, grant: Grant) -> bool:
        return await leave.release(self, grant)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        await leave.abandon(self, claim, until)

    # Waiting, keeping, looking, ending: see the modules they are in.

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        if claim.ttl < SHORT_TTL:  # its lease must be kept alive more often than the renewer does
            session = await self.leases.session(claim.ttl, until)
            until = min(until, session.since + session.ttl * FRESH_SHARE)
        if await self.waits.wait(claim, busy, until):
            return await leave.handed_to(self, claim, until)
        return None

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
        return await renew(self.leases, grants, waits, until, shorten)

    async def revoke(self, name: str) -> list[int]:
        return await view.revoke(self, name)

    async def look(self, name: str) -> LockInfo:
        return await view.look(self, name)

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        return await view.survey(self, prefix, cursor, limit)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        return await view.record(self, grant, value, keep_seconds)

    async def recall(self, name: str) -> Record | None:
        return await view.recall(self, name)

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        await view.watch(self, name, seen, until)

    async def probe(self) -> list[Finding]:
        return await view.probe(self)

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


def _calls(front: Entry | None, claim: Claim) -> bool:
    """Whether who is in front will learn of the claim when it is granted, and call it."""
    return front is not None and front.mode is claim.mode is Mode.EXCLUSIVE and not front.given


def _http(store: EtcdStore, runtime: Runtime) -> Http:
    if runtime.blocking:
        from holdfast.io.http import BlockingHttp

        return BlockingHttp(store.servers, store.settings.connections)
    from holdfast.io.http_aio import AsyncHttp

    return AsyncHttp(store.servers, store.settings.connections)

"""How ``consul://`` admits claims: one transaction joins a name's line and reads it.

A Consul transaction knows no "else", so everybody joins first: who then fits holds at once,
who does not says that it waits, and becomes a hold by its own later transaction, which goes
through only if nobody is in front any more. A request whose answer was lost may still arrive
at any time: what undoes it also moves its session's guard, and joining checks the guard, so it
arrives in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.contract import (
    QUEUE_CAP,
    Finding,
    Page,
    Renewal,
    Runtime,
    Waiting,
)
from holdfast.core.ordered import Entry, Patience, judge
from holdfast.errors import BackendUnavailable, Incompatible, LimitMismatch, Unsupported
from holdfast.stores._consensus.sessions import Attempt, Session
from holdfast.stores._consensus.strict import DamagedAnswer
from holdfast.stores.consul import inspect as view
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import READ, Agent, Refused, SessionGone
from holdfast.stores.consul.orphans import DELAYED, RETRY_SECONDS, bury, remains_of
from holdfast.stores.consul.session import OPS, Held, Ref, SessionRenewer
from holdfast.stores.consul.wakeups import Waits

if TYPE_CHECKING:
    from holdfast.io.http import Http
    from holdfast.stores.consul.store import ConsulStore

__all__ = ["ConsulBackend"]

# How often an attempt starts over because the line changed under it.
TRIES = 20
STEP_ASIDE_SECONDS = 0.004
MOST_PERMITS = (OPS - 4) // 2
"""Every slot takes two operations of the one transaction that grants them."""


class ConsulBackend:
    """Admits claims in one Consul datacenter."""

    def __init__(self, store: ConsulStore, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        self.agent = Agent(_http(store, runtime))
        self.renewer = SessionRenewer(store, self.agent, runtime)
        self.waits = Waits(store, runtime)
        self._patience = Patience()
        store.backends.add(id(self))

    # Taking and giving back.

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
            except DamagedAnswer:  # Consul itself may have got the request, or get it later
                self.store.sessions.doubts[claim.owner] = session
                raise
            except Incompatible:
                if claim.owner not in self.store.holds:
                    await self.abandon(claim)  # it has joined them already
                raise
            if answer is not None:
                return answer
            # Others changed the line meanwhile: not all of them again in step.
            await self.runtime.sleep(self.runtime.between(0.0, STEP_ASIDE_SECONDS * tries))
        raise BackendUnavailable(f"{self.store.display}: the line of {claim.name!r} never rests")

    async def _attempt(self, at: Attempt) -> Grant | Busy | None:
        """The answer, or ``None`` to look again."""
        claim, owner = at.claim, at.claim.owner
        place = self.store.places.get(owner)
        if place is not None and claim.mode is not Mode.SLOTS and len(place.front) < OPS - 2:
            grant = await self._enter(at, place.front)
            if grant is not None:
                return grant
        known = place is not None or owner in self.store.holds
        if known or owner in self.store.sessions.doubts:
            line = await self.line(claim.name, at.until)
            if any(entry.owner == owner for entry in line):
                return await self._judge(at, line)
            self.store.places.pop(owner, None)
            self.store.holds.pop(owner, None)
        return await self._join(at)

    async def line(self, name: str, until: float | None = None) -> list[Entry]:
        """Everybody who holds or waits, in order, by a consistent read."""
        keys = self.store.names.of(name)
        body = requests.txn(requests.tree(keys.encoded))
        found = await self.agent.txn(body, line=READ, until=until)
        return requests.line_of(found, keys.prefix, self.store.waiting)

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
        except Refused as refused:
            if refused.delayed:  # the own entry went with its session
                return Busy(0, RETRY_SECONDS, reason=DELAYED)
            await self._learn_guard(session, until)
            return None
        # What the lock answered comes before the tree; a check answers only where there is a key.
        before = 1 if found[0]["Key"] == key.decode() else 2
        line = requests.line_of(found[before:], keys.prefix, self.store.waiting)
        own = next((entry for entry in line if entry.owner == claim.owner), None)
        if own is None:
            raise self.agent.damaged("the entry that it has just made is missing")
        if own.held and claim.mode is not Mode.SLOTS:
            return self._granted(claim, session, own.changed, ())
        return await self._judge(at, line)

    def _guard(self, session: Session) -> bytes:
        key = self.store.names.guard(session.id)
        if session.generation:
            return requests.same(key, session.generation)
        return requests.absent(key)

    async def _send(self, at: Attempt, body: bytes) -> list[dict[str, Any]]:
        try:
            return await self.agent.txn(body, until=at.until)
        except (Refused, SessionGone):
            raise
        except BaseException:  # it may have been carried out, or be so later
            self.store.sessions.doubts[at.claim.owner] = at.session
            raise

    async def _learn_guard(self, session: Session, until: float | None) -> None:
        body = requests.txn(requests.get(self.store.names.guard(session.id)))
        try:
            found = await self.agent.txn(body, line=READ, until=until)
        except Refused:
            session.generation = 0
        else:
            session.generation = int(found[0]["ModifyIndex"])

    def _granted(self, claim: Claim, session: Session, token: int, slots: tuple[int, ...]) -> Grant:
        self.store.places.pop(claim.owner, None)
        self.store.moved.pop(claim.owner, None)
        self.store.moving.pop(claim.owner, None)
        self.store.holds[claim.owner] = Held(token, slots)
        key = self.store.names.of(claim.name).entry(claim).decode()
        return Grant(claim, token, slots, session.since, Ref(key, session.id, session.ttl))

    async def _judge(self, at: Attempt, line: list[Entry]) -> Grant | Busy | None:
        remains = remains_of(line)
        if not remains:
            return await self._decide(at, line)
        if await self._bury(at, remains):
            return None
        answer = await self._decide(at, line)
        return answer._replace(reason=DELAYED) if isinstance(answer, Busy) else answer

    async def _decide(self, at: Attempt, line: list[Entry]) -> Grant | Busy | None:
        claim, join, session, until = at
        try:
            verdict = judge(claim, line, self.store.display)
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
        self.store.remember((entry.key, entry.order) for entry in line if not entry.held)
        absent, retry = self._patience.judge(verdict.absent, self.runtime.now())
        if absent is not None:
            await self._skip(claim.name, absent, until)
            return None
        if join and verdict.place < QUEUE_CAP:
            return self.waits.stand(claim, own, verdict, line, retry)
        if not join and claim.owner in self.store.places:
            return Busy(verdict.place, retry)
        await self.abandon(claim)
        reason = f"{QUEUE_CAP} already wait for {claim.name!r}" if join else ""
        return Busy(verdict.place, 1.0 if join else retry, reason=reason)

    def _hold_of(self, claim: Claim, own: Entry) -> Held | None:
        """What the own entry holds, if it does."""
        held = self.store.holds.get(claim.owner)
        if held is not None and own.held and own.details.token == held.token:
            return held
        if own.details.settled:  # the answer that said so was lost
            return Held(own.details.token, own.details.slots)
        return None

    async def _rebind(self, at: Attempt, own: Entry) -> None:
        """Binds the own entry to this session, with whose time a grant would count."""
        claim, _, session, _ = at
        keys, said = self.store.names.of(claim.name), own.details
        token = said.token if own.held else 0
        value = requests.entry_value(claim, said.since, behind=said.behind, token=token)
        if own.held:
            move = requests.Move(own.session, session.id)
            body = requests.moving(keys, claim, value, said.slots, move)
        else:
            key = keys.entry(claim)
            change = requests.lock(key, value, session.id)
            body = requests.txn(requests.unlock(key, own.session), change)
        with suppress(Refused):  # the line is looked at again
            await self._send(at, body)

    async def _bury(self, at: Attempt, remains: list[Entry]) -> bool:
        """Ends what sessions have left in the line; false while a lock-delay protects it."""
        if any(entry.owner == at.claim.owner for entry in remains):
            await self.abandon(at.claim)
            return True
        keys = self.store.names.of(at.claim.name)
        return await bury(self.agent, keys, remains, at.session.id, at.until)

    async def _enter(
        self, at: Attempt, front: tuple[str, ...], slots: tuple[int, ...] = ()
    ) -> Grant | None:
        """Makes the own entry a hold, if nothing in front and none of the slots is there."""
        claim, _, session, _ = at
        keys = self.store.names.of(claim.name)
        ops = [requests.absent(name.encode()) for name in front]
        for number in slots:
            slot, owner = keys.slot(number), requests.plain(claim.owner)
            ops += [requests.absent(slot), requests.lock(slot, owner, session.id)]
        ops += self._marking(claim, session)
        try:
            answer = await self._send(at, requests.txn(*ops))
        except Refused:
            return None
        return self._granted(claim, session, int(answer[-1]["ModifyIndex"]), slots)

    def _marking(self, claim: Claim, session: Session) -> list[bytes]:
        """Marks an entry that is still there as a hold; the mark's index is the token."""
        keys = self.store.names.of(claim.name)
        since = requests.plain(f"{self.runtime.wall():.3f}")
        return [
            requests.locked_by(keys.entry(claim), session.id),
            requests.lock(keys.mark(claim.owner), since, session.id),
        ]

    async def _skip(self, name: str, absent: Entry, until: float | None) -> None:
        """Takes its place from somebody who was let in and did not come."""
        mark = self.store.names.of(name).mark(absent.owner)
        skip = requests.delete_same(requests.quotable(absent.key), absent.changed)
        with suppress(Refused):  # it has come
            await self.agent.txn(requests.txn(requests.absent(mark), skip), until=until)

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        place = self.store.places.get(claim.owner)
        session = self.store.sessions.current(claim.ttl)
        mine = Ref(*grant.ref).key
        if (
            place is None
            or session is None
            or not session.fresh(self.runtime.now())
            or any(key != mine for key in place.front)
            or grant.claim.owner in self.store.sessions.doubts
            or claim.mode is Mode.SLOTS
        ):
            return await self._in_two_steps(grant, claim)
        # Nobody else was in front of it, and nobody can have come in front since.
        mark = self.store.names.of(grant.claim.name).mark(grant.claim.owner)
        body = requests.txn(
            requests.get(mine.encode()),
            requests.delete(mine.encode()),
            requests.delete(mark),
            *self._marking(claim, session),
        )
        try:
            answer = await self._send(Attempt(claim, True, session, None), body)
        except (Refused, SessionGone):
            return await self._in_two_steps(grant, claim)
        self.store.forgotten(grant.claim.owner)
        return True, self._granted(claim, session, int(answer[-1]["ModifyIndex"]), ())

    async def _in_two_steps(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        """One that stands in line is woken by the release, or has come by itself: asked for on its
        behalf, it might be let in anew after it left."""
        known = claim.owner in self.store.places or claim.owner in self.store.holds
        was_ours = await self.release(grant)
        return was_ours, Busy(0) if known else await self.attempt(claim, join=True)

    async def release(self, grant: Grant) -> bool:
        claim, keys = grant.claim, self.store.names.of(grant.claim.name)
        await self._move_guard(claim)
        key = Ref(*grant.ref).key.encode()
        ends = [key, keys.mark(claim.owner), *map(keys.slot, grant.slots)]
        try:
            await self.agent.txn(requests.txn(requests.get(key), *map(requests.delete, ends)))
        except Refused:
            ours = False
        else:
            ours = True
        self._over(claim)
        return ours

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        keys = self.store.names.of(claim.name)
        await self._move_guard(claim, until)
        ends = [keys.entry(claim), keys.mark(claim.owner)]
        await self.agent.txn(requests.txn(*map(requests.delete, ends)), until=until)
        if claim.mode is Mode.SLOTS:
            await self._delete_slots(claim, until)
        self._over(claim)

    def _over(self, claim: Claim) -> None:
        self.store.forgotten(claim.owner)
        self.store.sessions.doubts.pop(claim.owner, None)

    async def _move_guard(self, claim: Claim, until: float | None = None) -> None:
        """If a request for this claim may still be on its way, it shall arrive in vain."""
        session = self.store.sessions.doubts.get(claim.owner)
        if session is None:
            return
        guard = self.store.names.guard(session.id)
        value = requests.plain(f"{self.runtime.now()}")  # only a change moves the index
        with suppress(SessionGone):  # and with it the claim's entry, and whatever still comes
            body = requests.txn(requests.lock(guard, value, session.id))
            answer = await self.agent.txn(body, until=until)
            session.generation = int(answer[0]["ModifyIndex"])

    async def _delete_slots(self, claim: Claim, until: float | None) -> None:
        """The slots of an entry that is gone: no new ones can be taken for it. But those that it
        had may be gone, too, and somebody else's."""
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
            with suppress(Refused):
                await self.agent.txn(requests.txn(*ends), until=until)
                return

    # Waiting, keeping, looking, ending: see the modules they are in.

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        await self.waits.wait(claim, busy, until)

    def nudge(self, claim: Claim) -> None:
        self.waits.listening.nudge(claim.owner)

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        return await self.renewer.renew(grants, waits, until, shorten)

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
        store = self.store
        for known in (store.places, store.holds, store.moved, store.moving):
            known.clear()
        self.renewer.forget()
        self.agent.http.forget()
        self.waits.listening.forget()

    async def close(self) -> None:
        if id(self) in self.store.backends:
            self.store.backends.discard(id(self))
            if not self.store.backends:
                await self.renewer.end_all()
        self.waits.listening.close()
        await self.agent.http.close()


def _http(store: ConsulStore, runtime: Runtime) -> Http:
    if runtime.blocking:
        from holdfast.io.http import BlockingHttp

        return BlockingHttp(store.servers, store.settings.connections)
    from holdfast.io.http_aio import AsyncHttp

    return AsyncHttp(store.servers, store.settings.connections)

"""The etcd leases of one door: opened when needed, kept alive, and looked at key by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from holdfast.backends import etcd_requests as requests
from holdfast.backends.etcd_gateway import Gateway, SessionGone
from holdfast.backends.sessions import Opening, Session, whole
from holdfast.claim import Claim, Grant
from holdfast.core.contract import Renewal, Runtime, Waiting
from holdfast.errors import BackendUnavailable, HoldfastError

if TYPE_CHECKING:
    from holdfast.backends.etcd import EtcdStore

__all__ = ["SOMEBODY", "Heir", "Leases", "Place", "Ref"]

GRANT = b"POST /v3/lease/grant"
KEEP_ALIVE = b"POST /v3/lease/keepalive"
TIME_TO_LIVE = b"POST /v3/lease/timetolive"
REVOKE = b"POST /v3/lease/revoke"
TXN = b"POST /v3/kv/txn"
SETTLED_PER_REQUEST = 100
"""etcd allows 128 operations in one transaction."""


class Heir(NamedTuple):
    """Who stood next in line when a waiter was granted, and relies on being called."""

    key: str
    value: str
    changed: int
    session: str


SOMEBODY = Heir("", "", 0, "")
"""Somebody may rely on being called, but who is not known."""


class Ref(NamedTuple):
    """Where a hold is: its key, and the lease it was bound to when it was granted."""

    key: str
    session: str
    ttl: int
    heir: Heir | None = None
    """Whom its release calls. Nobody, if all who came behind it saw that it is a hold."""


class Place(NamedTuple):
    """A place in a line that this door has."""

    order: int
    value: bytes
    """What stands in its entry."""
    since: float
    behind: int
    front: str | None
    """The one entry that it had to wait for when it was last looked at; empty: none was there;
    ``None``: several. None is ever added."""


class _Kept(NamedTuple):
    since: float
    keys: frozenset[str]


class Leases:
    """One backend's view of its store's sessions."""

    def __init__(self, store: EtcdStore, gateway: Gateway, runtime: Runtime) -> None:
        self.store, self.gateway, self.runtime = store, gateway, runtime
        self.sessions = store.sessions
        self._opening = Opening(runtime)

    def fresh(self, ttl: float) -> Session | None:
        """The current session of a ttl, if it has enough certain time."""
        session = self.sessions.current(ttl)
        return session if session is not None and session.fresh(self.runtime.now()) else None

    async def session(self, ttl: float, until: float | None = None) -> Session:
        """The same, opened or asked for if need be."""
        session = self.fresh(ttl)
        if session is not None:
            return session
        ends = self.runtime.now() + self.store.settings.request_seconds
        until = ends if until is None or ends < until else until
        try:
            async with self._opening.turn(until):
                return await self._freshen(ttl, until)
        except TimeoutError:
            raise BackendUnavailable(f"{self.store.display}: no lease was opened in time") from None

    async def _freshen(self, ttl: float, until: float) -> Session:
        session = self.sessions.current(ttl)
        if session is not None and (
            session.fresh(self.runtime.now())
            or await self.keep_alive(session.id, until) is not None
        ):
            return session
        sent = self.runtime.now()
        answer = await self.gateway.post(GRANT, b'{"TTL":"%d"}' % whole(ttl), until)
        return self.sessions.install(Session(answer["ID"], whole(ttl), sent))

    async def keep_alive(self, session_id: str, until: float | None = None) -> float | None:
        """When the answered request was sent, or ``None`` if the session is gone."""
        sent = self.runtime.now()
        answer = await self.gateway.post(KEEP_ALIVE, b'{"ID":"%b"}' % session_id.encode(), until)
        if int(answer.get("result", {}).get("TTL", 0)) <= 0:
            self.sessions.ended(session_id)
            return None
        self.sessions.answered(session_id, sent)
        return sent

    async def time_to_live(
        self, session_id: str, until: float | None = None
    ) -> tuple[float, frozenset[str]]:
        """Seconds that the store would still wait, and the keys that are bound to it."""
        body = b'{"ID":"%b","keys":true}' % session_id.encode()
        answer = await self.gateway.post(TIME_TO_LIVE, body, until)
        return float(answer.get("TTL", 0)), frozenset(answer.get("keys") or ())

    async def renew(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], until: float
    ) -> Renewal:
        work = _Renewing(self, until)
        for grant in grants:
            await work.grant(grant)
        await work.settle()
        for waiting in waits:
            await work.waiting(waiting)
        return Renewal(work.lost, work.unknown, frozenset(work.forgotten), work.since)

    async def end_all(self) -> None:
        """Revokes what this door opened; what does not answer ends by itself."""
        for session in self.sessions.all():
            try:
                body = b'{"ID":"%b"}' % session.id.encode()
                await self.gateway.post(REVOKE, body, self.runtime.now() + 1.0)
            except (HoldfastError, SessionGone):
                continue
        self.sessions.forget()

    def forget(self) -> None:
        self._opening.forget()


class _Renewing:
    """One batch: a keep-alive and a list of keys per session, however many holds it has."""

    def __init__(self, leases: Leases, until: float) -> None:
        self._leases, self._until = leases, until
        self._kept: dict[str, _Kept | str | None] = {}
        self.lost: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.since: float | None = None
        self._unsettled: list[tuple[Grant, Ref]] = []

    async def _keep(self, session_id: str) -> _Kept | str | None:
        """What a session holds once it was kept alive; the cause if unknown; None if gone."""
        if session_id not in self._kept:
            self._kept[session_id] = await self._ask(session_id)
        return self._kept[session_id]

    async def _ask(self, session_id: str) -> _Kept | str | None:
        try:
            since = await self._leases.keep_alive(session_id, self._until)
            if since is None:
                return None
            _, keys = await self._leases.time_to_live(session_id, self._until)
        except BackendUnavailable as error:
            return str(error)
        self.since = since if self.since is None else min(self.since, since)
        return _Kept(since, keys)

    async def grant(self, grant: Grant) -> None:
        owner, ref = grant.claim.owner, Ref(*grant.ref)
        if not self._leases.store.tags.has(grant.claim):  # its key may be another's by now
            self._lose(grant.claim, "it was released")
            return
        current = self._leases.sessions.current(grant.claim.ttl)
        if current is not None:
            kept = await self._keep(current.id)
            if isinstance(kept, str):
                self.unknown[owner] = kept
                return
            if kept is not None and ref.key in kept.keys:
                self._found(grant, ref)
                return
        kept = await self._keep(ref.session)
        if isinstance(kept, str):
            self.unknown[owner] = kept
        elif kept is None:
            self._lose(grant.claim, "its etcd lease ran out or was revoked")
        elif ref.key not in kept.keys:
            self._lose(grant.claim, "its entry in etcd is gone: the hold was broken")
        else:
            self._found(grant, ref)
            if ref.ttl != whole(grant.claim.ttl):
                await self._move(grant, ref)

    def _found(self, grant: Grant, ref: Ref) -> None:
        if grant.claim.owner in self._leases.store.handed:
            self._unsettled.append((grant, ref))

    async def settle(self) -> None:
        """Says in their entries that what was handed over is held."""
        leases = self._leases
        for start in range(0, len(self._unsettled), SETTLED_PER_REQUEST):
            portion = self._unsettled[start : start + SETTLED_PER_REQUEST]
            parts = [self._settling(grant, ref) for grant, ref in portion]
            try:
                answer = await leases.gateway.post(TXN, requests.txn([], parts), self._until)
            except BackendUnavailable as error:
                self.unknown |= {grant.claim.owner: str(error) for grant, _ in portion}
                continue
            for (grant, _), reply in zip(portion, answer["responses"], strict=True):
                if reply["response_txn"].get("succeeded"):
                    leases.store.places.pop(grant.claim.owner, None)
                    leases.store.handed.discard(grant.claim.owner)
                else:
                    self._lose(grant.claim, "its entry in etcd is gone: the hold was broken")

    def _settling(self, grant: Grant, ref: Ref) -> bytes:
        key = ref.key.encode()
        value = requests.entry_value(grant.claim, self._leases.runtime.wall(), held=True)
        mine = requests.created_at(key, grant.token)
        return requests.nested([mine], [requests.change(key, value)])

    def _lose(self, claim: Claim, reason: str) -> None:
        store, owner = self._leases.store, claim.owner
        store.places.pop(owner, None)
        store.handed.discard(owner)
        store.tags.retire(claim)
        self.lost[owner] = reason

    async def _move(self, grant: Grant, ref: Ref) -> None:
        """Binds a hold whose ttl was changed to the session of its new ttl."""
        owner, leases = grant.claim.owner, self._leases
        key = ref.key.encode()
        try:
            session = await leases.session(grant.claim.ttl, self._until)
            change = b'{"request_put":{"key":"%b","ignore_value":true,"lease":"%b"}}' % (
                key,
                session.id.encode(),
            )
            body = requests.txn([requests.created_at(key, grant.token)], [change])
            answer = await leases.gateway.post(TXN, body, self._until)
        except (BackendUnavailable, SessionGone) as error:
            self.unknown[owner] = str(error) or "the new lease ended at once"
            return
        if not answer.get("succeeded"):
            self._lose(grant.claim, "its entry in etcd is gone: the hold was broken")
            return
        self.since = session.since if self.since is None else min(self.since, session.since)

    async def waiting(self, waiting: Waiting) -> None:
        claim, store = waiting.claim, self._leases.store
        session = self._leases.sessions.current(claim.ttl)
        kept = None if session is None else await self._keep(session.id)
        if isinstance(kept, str):
            return
        key = store.key(claim)
        if kept is None or key.decode() not in kept.keys:
            self.forgotten.add(claim.owner)
            return
        place = store.places.get(claim.owner)
        if place is not None and place.behind != waiting.behind:
            new = requests.entry_value(claim, place.since, held=False, behind=waiting.behind)
            body = requests.behind(key, place.value, new)
            try:
                await self._leases.gateway.post(TXN, body, self._until)
            except BackendUnavailable:
                return  # told again with the next refresh
            if store.places.get(claim.owner) is place:  # neither granted nor gone meanwhile
                store.places[claim.owner] = place._replace(behind=waiting.behind, value=new)

"""The etcd leases of one client, opened when needed, and what claims know of theirs.

A lease that is kept alive lists its keys, so however many holds it has, they are two requests. That
list may be old, and a hold whose ttl was changed may be bound to another lease, even to one that
nobody remembers: an answer got lost, or two changed it at a time. So a hold that is not on the
list is looked for by a linearizable read before it is given up, and bound to the lease of its
ttl wherever it is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Renewal, Runtime, Waiting
from holdfast.errors import BackendUnavailable, HoldfastError, Unsupported
from holdfast.stores._consensus.sessions import RuntimeLock, Session, whole
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.gateway import Gateway, SessionGone

if TYPE_CHECKING:
    from holdfast.stores.etcd.backend import EtcdStore

__all__ = ["SOMEBODY", "Heir", "Leases", "Place", "Ref", "RenewalBatch"]

GRANT = b"POST /v3/lease/grant"
KEEP_ALIVE = b"POST /v3/lease/keepalive"
TIME_TO_LIVE = b"POST /v3/lease/timetolive"
REVOKE = b"POST /v3/lease/revoke"
RANGE = b"POST /v3/kv/range"
TXN = b"POST /v3/kv/txn"
PARTS_PER_REQUEST = 100
"""etcd allows 128 operations in one transaction."""
BROKEN = "its entry in etcd is gone: the hold was broken"
OVERWRITTEN = "its entry in etcd was overwritten by something else"
RAN_OUT = "its etcd lease ran out or was revoked"


class Heir(NamedTuple):
    """Who stood next in line when a waiter was granted, and relies on being called."""

    key: str
    value: str
    changed: int
    session: str


SOMEBODY = Heir("", "", 0, "")
"""Somebody may rely on being called, but who is not known."""


class Ref(NamedTuple):
    """Where a hold is: its key, since which revision that is its own, and the lease it was bound
    to when it was granted."""

    key: str
    order: int
    session: str
    heir: Heir | None = None
    """Whom its release calls. Nobody, if all who came behind it saw that it is a hold."""

    def stands(self) -> bytes:
        """Holds as long as the hold is there."""
        return requests.created_at(self.key.encode(), self.order)


class Place(NamedTuple):
    """A place in a line that this client has."""

    order: int
    value: bytes
    """What stands in its entry."""
    since: float
    behind: int
    front: str | None
    """The one entry that it had to wait for when it was last looked at; empty: none was there;
    ``None``: several. None is ever added."""


class Leases:
    """One backend's view of its store's sessions."""

    def __init__(self, store: EtcdStore, gateway: Gateway, runtime: Runtime) -> None:
        self.store, self.gateway, self.runtime = store, gateway, runtime
        self.sessions = store.sessions
        self._opening = RuntimeLock(runtime)

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

    async def longer(self, session_id: str, ttl: float, until: float | None) -> Session | None:
        """A session of a longer ttl, with enough certain time for a hold of this one."""
        session = self.sessions.longer(session_id, ttl)
        if session is None or session.fresh(self.runtime.now(), ttl):
            return session
        return None if await self.keep_alive(session_id, until) is None else session

    async def keep_alive(self, session_id: str, until: float | None = None) -> float | None:
        """When the answered request was sent, or ``None`` if the session is gone."""
        sent = self.runtime.now()
        answer = await self.gateway.post(KEEP_ALIVE, b'{"ID":"%b"}' % session_id.encode(), until)
        result = answer["result"]
        if int(result.get("TTL", 0)) <= 0:
            self.sessions.ended(session_id)
            return None
        await self._confirm(session_id, result["header"]["raft_term"], until)
        self.sessions.answered(session_id, sent)
        return sent

    async def _confirm(self, session_id: str, term: str, until: float | None) -> None:
        """Proves that who kept a session alive leads a majority: a leader that was replaced and
        has not heard of it answers that by itself. For a read it must ask the others. If that was
        answered in the same term, other leaders come later, and give the session its whole ttl."""
        body = b'{"key":"%b","keys_only":true}' % self.store.names.guard(session_id)
        found = await self.gateway.post(RANGE, body, until)
        if found["header"]["raft_term"] != term:
            raise BackendUnavailable(f"{self.store.display} has just elected another leader")

    async def time_to_live(
        self, session_id: str, until: float | None = None
    ) -> tuple[float, frozenset[str]]:
        """Seconds that the store would still wait, and the keys that are bound to it."""
        body = b'{"ID":"%b","keys":true}' % session_id.encode()
        answer = await self.gateway.post(TIME_TO_LIVE, body, until)
        return float(answer.get("TTL", 0)), frozenset(answer.get("keys") or ())

    async def end_all(self) -> None:
        """Revokes what this client opened; what does not answer ends by itself."""
        for session in self.sessions.all():
            try:
                body = b'{"ID":"%b"}' % session.id.encode()
                await self.gateway.post(REVOKE, body, self.runtime.now() + 1.0)
            except (HoldfastError, SessionGone):
                continue
        self.sessions.forget()

    def forget(self) -> None:
        self._opening.forget()


class _Kept(NamedTuple):
    since: float
    keys: frozenset[str]


class RenewalBatch:
    """One batch: a confirmed keep-alive and a list of keys per session, however many holds."""

    def __init__(self, leases: Leases, until: float, shorten: bool) -> None:
        self._leases, self._until, self._shorten = leases, until, shorten
        self._kept: dict[str, _Kept | str | None] = {}
        self._lost: dict[str, str] = {}
        self._unknown: dict[str, str] = {}
        self._forgotten: set[str] = set()
        self._since: float | None = None
        self._missing: list[Grant] = []
        self._elsewhere: list[tuple[Grant, bytes]] = []
        self._unsettled: list[Grant] = []

    async def run(self, grants: Sequence[Grant], waits: Sequence[Waiting]) -> Renewal:
        """Keeps what is still there, and says what is not."""
        for grant in grants:
            await self._grant(grant)
        await self._find()
        await self._move()
        await self._settle()
        for waiting in waits:
            await self._waiting(waiting)
        return Renewal(self._lost, self._unknown, frozenset(self._forgotten), self._since)

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
        except (BackendUnavailable, Unsupported) as error:
            return str(error)
        self._counts_from(since)
        return _Kept(since, keys)

    def _counts_from(self, since: float) -> None:
        self._since = since if self._since is None else min(self._since, since)

    async def _grant(self, grant: Grant) -> None:
        """Looks for a hold among the keys of the session that it should be bound to."""
        if not self._leases.store.tags.has(grant.claim):  # its key may be another's by now
            self._lose(grant.claim, "it was released")
            return
        session = self._leases.sessions.current(grant.claim.ttl)
        kept = None if session is None else await self._keep(session.id)
        if isinstance(kept, str):
            self._unknown[grant.claim.owner] = kept
        elif kept is not None and Ref(*grant.ref).key in kept.keys:
            self._found(grant)
        else:
            self._missing.append(grant)

    def _found(self, grant: Grant) -> None:
        if grant.claim.owner in self._leases.store.handed:
            self._unsettled.append(grant)

    async def _find(self) -> None:
        """Reads the entries of holds that are not where they should be."""
        asked = [(g, requests.read(Ref(*g.ref).key.encode())) for g in self._missing]
        for grant, reply in await self._each(asked):
            kvs = reply["response_range"].get("kvs")
            if not kvs or int(kvs[0]["create_revision"]) != Ref(*grant.ref).order:
                self._lose(grant.claim, await self._why(grant))
                continue
            if not self._shorten and await self._stays(kvs[0].get("lease", ""), grant.claim.ttl):
                self._found(grant)
                continue
            try:
                session = await self._leases.session(grant.claim.ttl, self._until)
            except BackendUnavailable as error:
                self._unknown[grant.claim.owner] = str(error)
                continue
            self._counts_from(session.since)
            if kvs[0].get("lease") == session.id:
                self._found(grant)
                continue
            try:
                self._elsewhere.append((grant, _moving(grant, session, kvs[0])))
            except ValueError:
                self._lose(grant.claim, OVERWRITTEN)

    async def _stays(self, session_id: str, ttl: float) -> bool:
        """Keeps a hold where it is if that is a session of a longer ttl; whether it was. Only an
        owner who asks for it gets the shorter one: this request may arrive after later ones."""
        longer = self._leases.sessions.longer(session_id, ttl)
        return longer is not None and isinstance(await self._keep(session_id), _Kept)

    async def _why(self, grant: Grant) -> str:
        """The reason for which an entry must have ended."""
        current = self._leases.sessions.current(grant.claim.ttl)
        granted = Ref(*grant.ref).session
        kept = [await self._keep(granted if current is None else current.id)]
        kept.append(await self._keep(granted))
        return RAN_OUT if None in kept else BROKEN

    async def _move(self) -> None:
        """Binds holds whose ttl was changed to the sessions of their new ttls."""
        for grant, reply in await self._each(self._elsewhere):
            if reply["response_txn"].get("succeeded"):
                self._found(grant)
            else:
                self._lose(grant.claim, BROKEN)

    async def _settle(self) -> None:
        """Says in their entries that what was handed over is held."""
        store = self._leases.store
        asked = [(grant, self._settling(grant)) for grant in self._unsettled]
        for grant, reply in await self._each(asked):
            if reply["response_txn"].get("succeeded"):
                store.places.pop(grant.claim.owner, None)
                store.handed.discard(grant.claim.owner)
            else:
                self._lose(grant.claim, BROKEN)

    async def _each(
        self, asked: Sequence[tuple[Grant, bytes]]
    ) -> list[tuple[Grant, dict[str, Any]]]:
        """What was answered to each, asked in as few transactions as etcd allows; where nothing
        was, the outcome is unknown."""
        answered: list[tuple[Grant, dict[str, Any]]] = []
        for start in range(0, len(asked), PARTS_PER_REQUEST):
            grants, parts = zip(*asked[start : start + PARTS_PER_REQUEST], strict=True)
            try:
                body = requests.txn([], parts)
                answer = await self._leases.gateway.post(TXN, body, self._until)
            except (BackendUnavailable, SessionGone) as error:
                cause = str(error) or "a new lease ended at once"
                self._unknown |= {grant.claim.owner: cause for grant in grants}
                continue
            answered += zip(grants, answer["responses"].exactly(len(grants)), strict=True)
        return answered

    def _settling(self, grant: Grant) -> bytes:
        ref = Ref(*grant.ref)
        value = requests.entry_value(grant.claim, self._leases.runtime.wall(), held=True)
        return requests.nested([ref.stands()], [requests.change(ref.key.encode(), value)])

    def _lose(self, claim: Claim, reason: str) -> None:
        store, owner = self._leases.store, claim.owner
        store.places.pop(owner, None)
        store.handed.discard(owner)
        store.tags.retire(claim)
        self._lost[owner] = reason

    async def _waiting(self, waiting: Waiting) -> None:
        claim, store = waiting.claim, self._leases.store
        session = self._leases.sessions.current(claim.ttl)
        kept = None if session is None else await self._keep(session.id)
        if isinstance(kept, str):
            return
        key = store.key(claim)
        if kept is None or key.decode() not in kept.keys:
            self._forgotten.add(claim.owner)
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


def _moving(grant: Grant, session: Session, kv: dict[str, str]) -> bytes:
    """Binds a hold to another session; slots say their token then, as it was a revision so far."""
    ref = Ref(*grant.ref)
    key = ref.key.encode()
    if grant.claim.mode is Mode.SLOTS:
        moved = requests.put(key, requests.told_value(kv.get("value", ""), grant.token), session.id)
    else:
        moved = requests.bind(key, session.id)
    return requests.nested([ref.stands()], [moved])

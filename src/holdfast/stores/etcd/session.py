"""The etcd leases of one client: opened when needed, kept alive, renewed with what they hold.

A session is an etcd lease. A keep-alive and a list of the lease's keys renew any number of holds.
That list may be old. A hold whose ttl was changed may be bound to another lease, even to a lease
that this client does not know: a reply was lost, or two threads changed the ttl at once. So a hold
that is not on the list is looked up by a linearizable read before it counts as lost, and is bound
to the lease of its ttl wherever it is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Renewal, Runtime, Waiting
from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.stores._consensus.sessions import RuntimeLock, Session, whole
from holdfast.stores.etcd import messages, requests
from holdfast.stores.etcd.calls import (
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    TIME_TO_LIVE,
    TXN,
    Calls,
    SessionGone,
)
from holdfast.stores.etcd.messages import KeyValue, LeaseReply, RangeReply, TxnReply, damaged

if TYPE_CHECKING:
    from holdfast.stores.etcd.backend import EtcdStore

__all__ = [
    "UNKNOWN_WAITER",
    "Leases",
    "NextWaiter",
    "Ref",
    "RenewalBatch",
    "WaitingEntry",
    "move_request",
]

R = TypeVar("R", RangeReply, TxnReply)
PARTS_PER_REQUEST = 100
"""etcd allows 128 operations in one transaction."""
REVOKE_SECONDS = 1.0
"""How long a revoke may take when the client is closed."""
BROKEN = "its entry in etcd is gone: the hold was broken"
OVERWRITTEN = "its entry in etcd was overwritten by something else"
RAN_OUT = "its etcd lease ran out or was revoked"


class NextWaiter(NamedTuple):
    """The entry next in the queue when a waiter was granted. It relies on a wake-up by the
    release."""

    key: str
    value: bytes
    changed: int
    session: str


UNKNOWN_WAITER = NextWaiter("", b"", 0, "")
"""A waiter may rely on a wake-up by the release, but which one is not known."""


class Ref(NamedTuple):
    """Where a hold is stored: its key, the key's create revision, and the lease at the grant."""

    key: str
    order: int
    session: str
    next_waiter: NextWaiter | None = None
    """The waiter that the release wakes. None if every waiter behind saw a hold, and watches it."""

    def exists(self) -> bytes:
        """Compares: the entry of the hold is still there."""
        return requests.created_at(self.key.encode(), self.order)


class WaitingEntry(NamedTuple):
    """An entry of this client that waits in a queue."""

    order: int
    value: bytes
    """The stored value of the entry."""
    since: float
    behind: int
    only_ahead: str | None
    """Key of the only entry ahead at the last read; "" if there was none; None if several. Entries
    ahead can only disappear."""
    place: int = 0
    """How many waited ahead when they were last counted."""


class Leases:
    """The sessions of the store, as one backend opens them and keeps them alive."""

    def __init__(self, store: EtcdStore, calls: Calls, runtime: Runtime) -> None:
        self.store, self.calls, self.runtime = store, calls, runtime
        self.sessions = store.sessions
        self._lock = RuntimeLock(runtime)

    def fresh(self, ttl: float) -> Session | None:
        """Returns the current session of a ttl if it has enough certain time left."""
        session = self.sessions.current(ttl)
        return session if session is not None and session.fresh(self.runtime.now()) else None

    async def session(self, ttl: float, until: float | None = None) -> Session:
        """Returns the current session of a ttl; keeps it alive first, or opens one, if needed.
        Raises ``BackendUnavailable``."""
        session = self.fresh(ttl)
        if session is not None:
            return session
        ends = self.runtime.now() + self.store.settings.request_seconds
        until = ends if until is None or ends < until else until
        try:
            async with self._lock.hold(until):
                return await self._refresh(ttl, until)
        except TimeoutError:
            raise BackendUnavailable(
                f"{self.store.display}: no lease could be opened in time"
            ) from None

    async def _refresh(self, ttl: float, until: float) -> Session:
        session = self.sessions.current(ttl)
        if session is not None and (
            session.fresh(self.runtime.now())
            or await self.keep_alive(session.id, until) is not None
        ):
            return session
        return self.sessions.install(await self.new(ttl, until))

    async def new(self, ttl: float, until: float) -> Session:
        """A new session, which is nobody's current one."""
        sent = self.runtime.now()
        answer = await self.calls.call(GRANT, messages.grant_lease(whole(ttl)), until)
        self._check_ttl(answer, whole(ttl))
        return Session(answer.id, whole(ttl), sent)

    async def longer(self, session_id: str, ttl: float, until: float | None) -> Session | None:
        """Returns the session with this id if its ttl is longer than ``ttl``, kept alive if needed.
        None if it is not, or has ended."""
        session = self.sessions.longer(session_id, ttl)
        if session is None or session.fresh(self.runtime.now(), ttl):
            return session
        return None if await self.keep_alive(session_id, until) is None else session

    async def keep_alive(self, session_id: str, until: float | None = None) -> float | None:
        """Sends a keep-alive. Returns the time just before it was sent; None if the session has
        ended."""
        sent = self.runtime.now()
        answer = await self.calls.call(KEEP_ALIVE, messages.lease(session_id), until)
        if answer.id != session_id:
            raise damaged(self.store.display, "it is about another lease")
        if answer.ttl <= 0:
            self.sessions.ended(session_id)
            return None
        for session in self.sessions.all():
            if session.id == session_id:
                self._check_ttl(answer, session.ttl)
        await self._confirm_leader(session_id, answer.header.term, until)
        self.sessions.answered(session_id, sent)
        return sent

    def _check_ttl(self, answer: LeaseReply, ttl: int) -> None:
        """Raises ``BackendUnavailable`` for a ttl that is shorter than the one that was requested:
        etcd may only make it longer."""
        if answer.ttl < ttl:
            raise damaged(
                self.store.display, f"a lease of {answer.ttl} s, where {ttl} s were requested"
            )

    async def _confirm_leader(self, session_id: str, term: int, until: float | None) -> None:
        """Proves that the node that answered a keep-alive leads a majority. A replaced leader that
        does not know it yet answers keep-alives by itself, but a read needs the other nodes. If the
        read is answered in the same term, every other leader is a later one and gives the session
        its whole ttl again. Raises ``BackendUnavailable`` if the term changed."""
        guard = requests.only(self.store.names.guard(session_id)) + requests.KEYS_ONLY
        found = await self.calls.call(RANGE, guard, until)
        if found.header.term != term:
            raise BackendUnavailable(f"{self.store.display} has just elected another leader")

    async def time_to_live(
        self, session_id: str, until: float | None = None
    ) -> tuple[float, frozenset[str]]:
        """Returns the seconds until etcd ends the lease, and the keys that are bound to it."""
        answer = await self.calls.call(TIME_TO_LIVE, messages.lease_and_keys(session_id), until)
        return float(answer.ttl), answer.keys

    async def end_all(self) -> None:
        """Revokes all sessions of this client. A session whose revoke is not answered ends by
        itself."""
        for session in self.sessions.all():
            try:
                until = self.runtime.now() + REVOKE_SECONDS
                await self.calls.call(REVOKE, messages.lease(session.id), until)
            except (HoldfastError, SessionGone):
                continue
        self.sessions.forget()

    def forget(self) -> None:
        self._lock.forget()


class _KeptLease(NamedTuple):
    """A lease that was kept alive: when that was sent, and its keys."""

    since: float
    keys: frozenset[str]


class RenewalBatch:
    """Renews many holds and waiters with one confirmed keep-alive and one key list per session."""

    def __init__(self, leases: Leases, until: float, shorten: bool) -> None:
        self._leases, self._until, self._shorten = leases, until, shorten
        self._kept: dict[str, _KeptLease | str | None] = {}
        self._lost: dict[str, str] = {}
        self._unknown: dict[str, str] = {}
        self._forgotten: set[str] = set()
        self._since: float | None = None
        self._missing: list[Grant] = []
        self._to_move: list[tuple[Grant, bytes]] = []
        self._to_confirm: list[Grant] = []

    async def run(self, grants: Sequence[Grant], waits: Sequence[Waiting]) -> Renewal:
        """Renews what is still there and reports what is not."""
        for grant in grants:
            await self._check_grant(grant)
        await self._find_missing()
        await self._move_to_leases()
        await self._confirm_direct_grants()
        for waiting in waits:
            await self._refresh_waiting(waiting)
        return Renewal(self._lost, self._unknown, frozenset(self._forgotten), self._since)

    async def _kept_lease(self, session_id: str) -> _KeptLease | str | None:
        """Keeps a session alive once per batch. Returns its keys; the error's text if the outcome
        is unknown; None if the session has ended."""
        if session_id not in self._kept:
            self._kept[session_id] = await self._keep_alive(session_id)
        return self._kept[session_id]

    async def _keep_alive(self, session_id: str) -> _KeptLease | str | None:
        try:
            since = await self._leases.keep_alive(session_id, self._until)
            if since is None:
                return None
            _, keys = await self._leases.time_to_live(session_id, self._until)
        except HoldfastError as error:
            return str(error)
        self._counts_from(since)
        return _KeptLease(since, keys)

    def _counts_from(self, since: float) -> None:
        self._since = since if self._since is None else min(self._since, since)

    async def _check_grant(self, grant: Grant) -> None:
        """Looks for a hold among the keys of the session of its ttl."""
        # Without an allocated key: the hold's key may be recycled for another claim by now.
        if not self._leases.store.key_pool.is_allocated(grant.claim):
            self._lose(grant.claim, "it was released")
            return
        session = self._leases.sessions.current(grant.claim.ttl)
        kept = None if session is None else await self._kept_lease(session.id)
        if isinstance(kept, str):
            self._unknown[grant.claim.owner] = kept
        elif kept is not None and Ref(*grant.ref).key in kept.keys:
            self._renewed(grant)
        else:
            self._missing.append(grant)

    def _renewed(self, grant: Grant) -> None:
        """The entry of a hold is there. A direct grant is confirmed by its first renewal."""
        if grant.claim.owner in self._leases.store.direct_grants:
            self._to_confirm.append(grant)

    async def _find_missing(self) -> None:
        """Reads the entries of holds that are not on the key list of their session."""
        keys = [requests.only(Ref(*grant.ref).key.encode()) for grant in self._missing]
        parts = [(g, requests.read(key)) for g, key in zip(self._missing, keys, strict=True)]
        for grant, found in await self._transact(parts, TxnReply.range):
            try:
                await self._find(grant, found)
            except HoldfastError as error:  # a refusal, or a damaged reply: the others still count
                self._unknown[grant.claim.owner] = str(error)

    async def _find(self, grant: Grant, found: RangeReply) -> None:
        kv = found.kvs[0] if found.kvs else None
        if kv is None or kv.create_revision != Ref(*grant.ref).order:
            self._lose(grant.claim, await self._loss_reason(grant))
            return
        if not self._shorten and await self._stays(kv.lease, grant.claim.ttl):
            self._renewed(grant)
            return
        session = await self._leases.session(grant.claim.ttl, self._until)
        self._counts_from(session.since)
        if kv.lease == session.id:
            self._renewed(grant)
            return
        try:
            self._to_move.append((grant, move_request(grant, session, kv)))
        except ValueError:
            self._lose(grant.claim, OVERWRITTEN)

    async def _stays(self, session_id: str, ttl: float) -> bool:
        """Leaves a hold on a session of a longer ttl, and keeps that alive; True if so. Only the
        owner's own ``extend`` moves a hold to a shorter ttl: this renewal may arrive after later
        requests."""
        longer = self._leases.sessions.longer(session_id, ttl)
        return longer is not None and isinstance(await self._kept_lease(session_id), _KeptLease)

    async def _loss_reason(self, grant: Grant) -> str:
        """Returns why the entry of a hold must have ended."""
        current = self._leases.sessions.current(grant.claim.ttl)
        granted = Ref(*grant.ref).session
        kept = [await self._kept_lease(granted if current is None else current.id)]
        kept.append(await self._kept_lease(granted))
        return RAN_OUT if None in kept else BROKEN

    async def _move_to_leases(self) -> None:
        """Binds holds whose ttl was changed to the sessions of their new ttls."""
        for grant, reply in await self._transact(self._to_move, TxnReply.nested):
            if reply.succeeded:
                self._renewed(grant)
            else:  # the next renewal finds out how
                self._unknown[grant.claim.owner] = "its entry in etcd was changed meanwhile"

    async def _confirm_direct_grants(self) -> None:
        """Writes into the entries of direct grants that they are held."""
        store = self._leases.store
        parts = [(grant, self._confirm_request(grant)) for grant in self._to_confirm]
        for grant, reply in await self._transact(parts, TxnReply.nested):
            if self._applied(grant, reply):
                store.waiting.pop(grant.claim.owner, None)
                store.direct_grants.discard(grant.claim.owner)

    def _applied(self, grant: Grant, reply: TxnReply) -> bool:
        """True if a change of the hold's entry was applied; else the hold is lost."""
        if not reply.succeeded:
            self._lose(grant.claim, BROKEN)
        return reply.succeeded

    async def _transact(
        self, asked: Sequence[tuple[Grant, bytes]], part: Callable[[TxnReply, int], R]
    ) -> list[tuple[Grant, R]]:
        """Sends all requests in as few transactions as etcd allows. Returns their replies, each
        read by ``part``; holds without a reply that can be read are added to the unknown ones."""
        answered: list[tuple[Grant, R]] = []
        for start in range(0, len(asked), PARTS_PER_REQUEST):
            grants, parts = zip(*asked[start : start + PARTS_PER_REQUEST], strict=True)
            try:
                body = requests.txn([], parts)
                answer = await self._leases.calls.call(TXN, body, self._until)
                answer.exactly(len(grants))
                replies = [part(answer, number) for number in range(len(grants))]
            except (HoldfastError, SessionGone) as error:
                cause = str(error) or "a new lease ended at once"
                self._unknown |= {grant.claim.owner: cause for grant in grants}
                continue
            answered += zip(grants, replies, strict=True)
        return answered

    def _confirm_request(self, grant: Grant) -> bytes:
        ref = Ref(*grant.ref)
        value = requests.entry_value(grant.claim, self._leases.runtime.wall(), held=True)
        return requests.nested([ref.exists()], [requests.change(ref.key.encode(), value)])

    def _lose(self, claim: Claim, reason: str) -> None:
        store, owner = self._leases.store, claim.owner
        store.waiting.pop(owner, None)
        store.direct_grants.discard(owner)
        store.taking.pop(owner, None)
        store.key_pool.quarantine(claim)
        self._lost[owner] = reason

    async def _refresh_waiting(self, waiting: Waiting) -> None:
        """Keeps a waiter's lease alive and writes how many local waiters are behind it."""
        claim, store = waiting.claim, self._leases.store
        session = self._leases.sessions.current(claim.ttl)
        kept = None if session is None else await self._kept_lease(session.id)
        if isinstance(kept, str):
            self._unknown[claim.owner] = kept
            return
        key = store.key(claim)
        if kept is None or key.decode() not in kept.keys:
            self._forgotten.add(claim.owner)
            return
        entry = store.waiting.get(claim.owner)
        if entry is not None and entry.behind != waiting.behind:
            new = requests.entry_value(claim, entry.since, held=False, behind=waiting.behind)
            body = requests.change_behind(key, entry.value, new)
            try:
                await self._leases.calls.call(TXN, body, self._until)
            except (HoldfastError, SessionGone):
                return  # the next refresh writes it
            if store.waiting.get(claim.owner) is entry:  # not granted or abandoned since
                store.waiting[claim.owner] = entry._replace(behind=waiting.behind, value=new)


def move_request(grant: Grant, session: Session, kv: KeyValue) -> bytes:
    """Binds a hold to another session, if its entry has not changed since it was read: a request
    that arrives late must not bind a hold that was handed over. An entry of slots then has to store
    its token, which was the revision of its last write until now."""
    key = Ref(*grant.ref).key.encode()
    if grant.claim.mode is Mode.SLOTS:
        moved = requests.put(key, requests.value_with_token(kv.value, grant.token), session.id)
    else:
        moved = requests.bind(key, session.id)
    return requests.nested([requests.changed_at(key, kv.mod_revision)], [moved])

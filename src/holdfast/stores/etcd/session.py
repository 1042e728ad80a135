"""The etcd leases of one client, opened when needed, and what claims know of theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.stores._consensus.sessions import RuntimeLock, Session, whole
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.gateway import Gateway, SessionGone

if TYPE_CHECKING:
    from holdfast.stores.etcd.store import EtcdStore

__all__ = ["SOMEBODY", "Heir", "Leases", "Place", "Ref"]

GRANT = b"POST /v3/lease/grant"
KEEP_ALIVE = b"POST /v3/lease/keepalive"
TIME_TO_LIVE = b"POST /v3/lease/timetolive"
REVOKE = b"POST /v3/lease/revoke"
RANGE = b"POST /v3/kv/range"
TXN = b"POST /v3/kv/txn"


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

"""The Consul sessions of one client: created when needed, renewed, destroyed at the end.

A renewal renews each session once and checks the entries that are bound to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast.claim import Claim, Grant
from holdfast.core.contract import Renewal, Runtime, Waiting
from holdfast.errors import BackendUnavailable, HoldfastError, Unsupported
from holdfast.stores._consensus.sessions import RuntimeLock, Session, whole
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import (
    READ,
    Agent,
    NodeMissing,
    SessionGone,
    TransactionRefused,
)
from holdfast.stores.consul.orphans import sweep
from holdfast.stores.consul.requests import OPS

if TYPE_CHECKING:
    from holdfast.stores.consul.backend import ConsulStore

__all__ = ["ConsulHold", "Ref", "RenewalBatch", "SessionRenewer"]

REGISTER = b"PUT /v1/catalog/register"
CREATE = b"PUT /v1/session/create"
RENEW = b"PUT /v1/session/renew/"
DESTROY = b"PUT /v1/session/destroy/"
INFO = b"GET /v1/session/info/"
NODE = "holdfast-sessions"
"""The node that sessions are bound to. By default it would be the server that created the session,
and Consul ends the sessions of a node that leaves, or of a server that was dead for some seconds.
This node is no agent, and never leaves."""
BROKEN = "its entry in Consul is gone: the hold was broken"
DESTROY_SECONDS = 1.0


class Ref(NamedTuple):
    """The key of a hold, and the session that it is bound to."""

    key: str
    session: str
    ttl: int


class ConsulHold(NamedTuple):
    """A grant that this client was given."""

    token: int
    slots: tuple[int, ...]


class SessionRenewer:
    """Creates, renews and destroys the sessions of a store, over one backend's connections."""

    def __init__(self, store: ConsulStore, agent: Agent, runtime: Runtime) -> None:
        self.store, self.agent, self.runtime = store, agent, runtime
        self.sessions = store.sessions
        self._lock = RuntimeLock(runtime)

    async def session(self, ttl: float, until: float | None = None) -> Session:
        """The current session of a ttl, created or renewed if it has too little certain time left.

        Raises ``BackendUnavailable`` if that takes too long."""
        session = self.sessions.current(ttl)
        if session is not None and session.fresh(self.runtime.now()):
            return session
        ends = self.runtime.now() + self.store.settings.request_seconds
        until = ends if until is None or ends < until else until
        try:
            async with self._lock.hold(until):
                return await self._freshen(ttl, until)
        except TimeoutError:
            raise BackendUnavailable(
                f"{self.store.display}: no session was created in time"
            ) from None

    async def _freshen(self, ttl: float, until: float) -> Session:
        session = self.sessions.current(ttl)
        if session is not None and (
            session.fresh(self.runtime.now())
            or await self.keep_alive(session.id, until) is not None
        ):
            return session
        session = self.sessions.install(await self.new(ttl, until))
        if self.store.lock_delay:
            with suppress(HoldfastError, TransactionRefused, SessionGone):
                start = self.runtime.between(0, 1)
                await sweep(self.agent, self.store.names, session.id, start, until)
        return session

    async def new(self, ttl: float, until: float) -> Session:
        """A new session, which is nobody's current one."""
        sent = self.runtime.now()
        # No health checks: a node that flaps must not end holds. A dead client's sessions run out.
        options = {
            "Node": NODE,
            "Name": f"holdfast {self.store.settings.namespace}",
            "TTL": f"{whole(ttl)}s",
            "Checks": [],
            "NodeChecks": [],
            "Behavior": "release" if self.store.lock_delay else "delete",
            "LockDelay": f"{self.store.lock_delay:g}s",
        }
        session_id = await self._create(json.dumps(options).encode(), until)
        return Session(session_id, whole(ttl), sent)

    async def end(self, session_id: str, until: float | None) -> None:
        """Destroys a session, and with it what is bound to it."""
        await self.agent.ask(bool, DESTROY + session_id.encode(), b"", until)

    async def _create(self, options: bytes, until: float) -> str:
        """The id of a new session."""
        try:
            answer = await self.agent.ask(dict, CREATE, options, until)
        except NodeMissing:  # the first session in this datacenter
            node = {"Node": NODE, "Address": "127.0.0.1", "SkipNodeUpdate": True}
            await self.agent.ask(bool, REGISTER, json.dumps(node).encode(), until)
            answer = await self.agent.ask(dict, CREATE, options, until)
        if answer is None:
            raise self.agent.damaged("it has no session")
        session_id: str = answer["ID"]
        self.agent.hosts.known = True
        return session_id

    async def longer(self, session_id: str, ttl: float, until: float | None) -> Session | None:
        """The session of that id, if it has a longer ttl: with enough certain time for a hold of
        ``ttl``, renewed if need be. ``None`` if it is not of this client, or is gone."""
        session = self.sessions.longer(session_id, ttl)
        if session is None or session.fresh(self.runtime.now(), ttl):
            return session
        return None if await self.keep_alive(session_id, until) is None else session

    async def keep_alive(self, session_id: str, until: float | None = None) -> float | None:
        """Renews a session. Returns when the answered request was sent; ``None`` if the session is
        gone."""
        sent = self.runtime.now()
        if await self.agent.ask(list, RENEW + session_id.encode(), b"", until) is None:
            self.sessions.ended(session_id)
            return None
        self.sessions.answered(session_id, sent)
        return sent

    async def end_all(self) -> None:
        """Destroys the sessions of this client. Those that can't be destroyed run out."""
        for session in self.sessions.all():
            try:
                line = DESTROY + session.id.encode()
                await self.agent.ask(bool, line, b"", self.runtime.now() + DESTROY_SECONDS)
            except HoldfastError:
                continue
        self.sessions.forget()

    def forget(self) -> None:
        self._lock.forget()


class RenewalBatch:
    """One renewal of many holds and waiting claims: one request per session, and one read-only
    transaction per 64 entries, which checks that they exist and who locks them."""

    def __init__(self, renewer: SessionRenewer, until: float, shorten: bool) -> None:
        self._renewer, self._until, self._shorten = renewer, until, shorten
        self._store = renewer.store
        self._kept: dict[str, float | str | None] = {}
        self._lost: dict[str, str] = {}
        self._unknown: dict[str, str] = {}
        self._forgotten: set[str] = set()
        self._checks: list[tuple[Claim, bytes, Grant | None, int]] = []
        self._since: float | None = None

    async def renew(self, grants: Sequence[Grant], waits: Sequence[Waiting]) -> Renewal:
        for grant in grants:
            await self._renew_hold(grant)
        for waiting in waits:
            await self._renew_waiting(waiting)
        for start in range(0, len(self._checks), OPS):
            await self._check(self._checks[start : start + OPS])
        return Renewal(self._lost, self._unknown, frozenset(self._forgotten), self._since)

    async def _keep(self, session_id: str) -> float | str | None:
        """Renews a session once. Returns from when it is certain; the cause as text if that is
        unknown; ``None`` if the session is gone."""
        if session_id not in self._kept:
            try:
                since = await self._renewer.keep_alive(session_id, self._until)
            except (BackendUnavailable, Unsupported) as error:
                self._kept[session_id] = str(error)
            else:
                self._kept[session_id] = since
                self._certain(since)
        return self._kept[session_id]

    def _certain(self, since: float | None) -> None:
        if since is not None:
            self._since = since if self._since is None else min(self._since, since)

    async def _renew_hold(self, grant: Grant) -> None:
        owner, ref = grant.claim.owner, Ref(*grant.ref)
        session = self._store.ref_of(grant).session
        kept = await self._keep(session)
        if kept is None:
            self._lost[owner] = "its Consul session ran out or was destroyed"
        elif isinstance(kept, str):
            self._unknown[owner] = kept
        else:
            key = ref.key.encode()
            self._checks.append((grant.claim, requests.locked_by(key, session), grant, 0))

    async def _renew_waiting(self, waiting: Waiting) -> None:
        claim = waiting.claim
        session = self._renewer.sessions.current(claim.ttl)
        kept = None if session is None else await self._keep(session.id)
        if session is None or kept is None:
            self._forgotten.add(claim.owner)
        elif isinstance(kept, str):
            self._unknown[claim.owner] = kept
        else:
            key = self._store.names.of(claim.name).entry(claim)
            op = requests.locked_by(key, session.id)
            self._checks.append((claim, op, None, waiting.behind))

    async def _check(self, checks: list[tuple[Claim, bytes, Grant | None, int]]) -> None:
        body = requests.txn(*(op for _, op, _, _ in checks))
        failed: frozenset[int] = frozenset()
        try:
            await self._renewer.agent.txn(body, line=READ, until=self._until)
        except TransactionRefused as refused:
            failed = refused.failed
        except BackendUnavailable as error:
            self._unknown |= {claim.owner: str(error) for claim, *_ in checks}
            return
        for index, (claim, _, grant, behind) in enumerate(checks):
            if grant is None and index in failed:
                self._forgotten.add(claim.owner)
            elif grant is not None and index in failed:
                await self._find(grant)
            elif grant is None:
                await self._write_behind(claim, behind)
            elif self._is_to_move(self._store.ref_of(grant).ttl, whole(claim.ttl)):
                await self._move(grant, self._store.ref_of(grant))

    async def _find(self, grant: Grant) -> None:
        """For a hold that is not bound to its session: an extend without an answer may have bound
        it to another one."""
        claim, moving = grant.claim, self._store.moving.get(grant.claim.owner)
        kept = None if moving is None else await self._keep(moving.session)
        if moving is None or kept is None:
            self._lost[claim.owner] = BROKEN
            return
        try:
            if isinstance(kept, str):
                raise BackendUnavailable(kept)
            body = requests.txn(requests.locked_by(moving.key.encode(), moving.session))
            await self._renewer.agent.txn(body, line=READ, until=self._until)
        except TransactionRefused:
            self._lost[claim.owner] = BROKEN
        except BackendUnavailable as error:
            self._unknown[claim.owner] = str(error)
        else:
            self._store.moved[claim.owner] = moving
            if self._is_to_move(moving.ttl, whole(claim.ttl)):
                await self._move(grant, moving)

    def _is_to_move(self, bound: int, ttl: int) -> bool:
        """Whether a hold is bound to another session: to one with a shorter ttl only if its owner
        asks for that, since a request may reach Consul after later ones."""
        return bound != ttl if self._shorten else bound < ttl

    async def _write_behind(self, claim: Claim, behind: int) -> None:
        """Writes how many claims of this client wait behind an entry that still waits."""
        queued = self._store.queued.get(claim.owner)
        if queued is None or queued.behind == behind:
            return
        key = self._store.names.of(claim.name).entry(claim)
        value = requests.entry_value(claim, queued.since, behind=behind)
        change = requests.rewrite(key, value, queued.changed)
        try:
            answer = await self._renewer.agent.txn(requests.txn(change), until=self._until)
        except (BackendUnavailable, TransactionRefused, SessionGone):
            return
        if self._store.queued.get(claim.owner) is queued:  # neither granted nor ended since
            changed = int(answer[0]["ModifyIndex"])
            self._store.queued[claim.owner] = queued._replace(behind=behind, changed=changed)

    async def _move(self, grant: Grant, ref: Ref) -> None:
        """Binds a hold whose ttl was changed to the session of its new ttl."""
        claim = grant.claim
        try:
            session = await self._renewer.session(claim.ttl, self._until)
            # If the move has no answer, its holder counts on the whole new ttl from here on.
            kept = await self._keep(session.id)
            if isinstance(kept, str):
                raise BackendUnavailable(kept)
            value = requests.entry_value(claim, self._renewer.runtime.wall(), token=grant.token)
            keys, move = self._store.names.of(claim.name), requests.Move(ref.session, session.id)
            body = requests.moving(keys, claim, value, grant.slots, move)
            moved = self._store.moving[claim.owner] = Ref(ref.key, session.id, session.ttl)
            await self._renewer.agent.txn(body, until=self._until)
        except TransactionRefused:
            self._lost[claim.owner] = BROKEN
        except (BackendUnavailable, SessionGone) as error:
            self._unknown[claim.owner] = str(error) or "the new session has ended already"
        else:
            self._store.moved[claim.owner] = moved
            self._store.moving.pop(claim.owner, None)
            self._certain(session.since)

"""The Consul sessions of one client: opened when needed, renewed, and their holds looked at."""

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
from holdfast.stores.consul.agent import READ, Agent, NodeMissing, Refused, SessionGone
from holdfast.stores.consul.orphans import sweep

if TYPE_CHECKING:
    from holdfast.stores.consul.store import ConsulStore

__all__ = ["OPS", "Held", "Ref", "SessionRenewer"]

REGISTER = b"PUT /v1/catalog/register"
CREATE = b"PUT /v1/session/create"
RENEW = b"PUT /v1/session/renew/"
DESTROY = b"PUT /v1/session/destroy/"
INFO = b"GET /v1/session/info/"
NODE = "holdfast-sessions"
BROKEN = "its entry in Consul is gone: the hold was broken"
"""What sessions are bound to. Consul ends the sessions of a node that leaves, also of a server that
was dead for some seconds; by default it is the one that was asked. This one never leaves."""
OPS = 64
"""How many operations a transaction may have."""


class Ref(NamedTuple):
    """Where a hold is: its key, and the session it was bound to when it was granted."""

    key: str
    session: str
    ttl: int


class Held(NamedTuple):
    """A grant that this client was given."""

    token: int
    slots: tuple[int, ...]


class SessionRenewer:
    """One backend's view of its store's sessions."""

    def __init__(self, store: ConsulStore, agent: Agent, runtime: Runtime) -> None:
        self.store, self.agent, self.runtime = store, agent, runtime
        self.sessions = store.sessions
        self._opening = RuntimeLock(runtime)

    async def session(self, ttl: float, until: float | None = None) -> Session:
        """The current session of a ttl with enough certain time, opened or renewed if need be."""
        session = self.sessions.current(ttl)
        if session is not None and session.fresh(self.runtime.now()):
            return session
        ends = self.runtime.now() + self.store.settings.request_seconds
        until = ends if until is None or ends < until else until
        try:
            async with self._opening.turn(until):
                return await self._freshen(ttl, until)
        except TimeoutError:
            raise BackendUnavailable(
                f"{self.store.display}: no session was opened in time"
            ) from None

    async def _freshen(self, ttl: float, until: float) -> Session:
        session = self.sessions.current(ttl)
        if session is not None and (
            session.fresh(self.runtime.now())
            or await self.keep_alive(session.id, until) is not None
        ):
            return session
        sent = self.runtime.now()
        # No health checks: a node that flaps must not end holds. What dies ends by its ttl.
        wish = {
            "Node": NODE,
            "Name": f"holdfast {self.store.settings.namespace}",
            "TTL": f"{whole(ttl)}s",
            "Checks": [],
            "NodeChecks": [],
            "Behavior": "release" if self.store.lock_delay else "delete",
            "LockDelay": f"{self.store.lock_delay:g}s",
        }
        session_id = await self._create(json.dumps(wish).encode(), until)
        session = self.sessions.install(Session(session_id, whole(ttl), sent))
        if self.store.lock_delay:
            with suppress(HoldfastError, Refused, SessionGone):
                start = self.runtime.between(0, 1)
                await sweep(self.agent, self.store, session.id, start, until)
        return session

    async def _create(self, wish: bytes, until: float) -> str:
        """The id of a new session."""
        try:
            answer = await self.agent.ask(dict, CREATE, wish, until)
        except NodeMissing:  # nobody was here before
            node = {"Node": NODE, "Address": "127.0.0.1", "SkipNodeUpdate": True}
            await self.agent.ask(bool, REGISTER, json.dumps(node).encode(), until)
            answer = await self.agent.ask(dict, CREATE, wish, until)
        if answer is None:
            raise self.agent.damaged("it made no session")
        session_id: str = answer["ID"]
        return session_id

    async def longer(self, session_id: str, ttl: float, until: float | None) -> Session | None:
        """A session of a longer ttl, with enough certain time for a hold of this one."""
        session = self.sessions.longer(session_id, ttl)
        if session is None or session.fresh(self.runtime.now(), ttl):
            return session
        return None if await self.keep_alive(session_id, until) is None else session

    async def keep_alive(self, session_id: str, until: float | None = None) -> float | None:
        """When the answered request was sent, or ``None`` if the session is gone."""
        sent = self.runtime.now()
        if await self.agent.ask(list, RENEW + session_id.encode(), b"", until) is None:
            self.sessions.ended(session_id)
            return None
        self.sessions.answered(session_id, sent)
        return sent

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        return await _Renewing(self, until, shorten).all(grants, waits)

    async def end_all(self) -> None:
        """Destroys what this client opened; what does not answer ends by itself."""
        for session in self.sessions.all():
            try:
                line = DESTROY + session.id.encode()
                await self.agent.ask(bool, line, b"", self.runtime.now() + 1.0)
            except HoldfastError:
                continue
        self.sessions.forget()

    def forget(self) -> None:
        self._opening.forget()


class _Renewing:
    """One batch: a renewal per session, and one question for 64 entries at a time."""

    def __init__(self, renewer: SessionRenewer, until: float, shorten: bool) -> None:
        self._renewer_thread, self._until, self._shorten = renewer, until, shorten
        self._store = renewer.store
        self._kept: dict[str, float | str | None] = {}
        self.lost: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self._asked: list[tuple[Claim, bytes, Grant | None, int]] = []
        self._since: float | None = None

    async def all(self, grants: Sequence[Grant], waits: Sequence[Waiting]) -> Renewal:
        for grant in grants:
            await self._grant(grant)
        for waiting in waits:
            await self._waiting(waiting)
        for start in range(0, len(self._asked), OPS):
            await self._look(self._asked[start : start + OPS])
        return Renewal(self.lost, self.unknown, frozenset(self.forgotten), self._since)

    async def _keep(self, session_id: str) -> float | str | None:
        """Since when a session is certain; the cause if unknown; None if gone."""
        if session_id not in self._kept:
            try:
                since = await self._renewer_thread.keep_alive(session_id, self._until)
            except (BackendUnavailable, Unsupported) as error:
                self._kept[session_id] = str(error)
            else:
                self._kept[session_id] = since
                self._certain(since)
        return self._kept[session_id]

    def _certain(self, since: float | None) -> None:
        if since is not None:
            self._since = since if self._since is None else min(self._since, since)

    async def _grant(self, grant: Grant) -> None:
        owner, ref = grant.claim.owner, Ref(*grant.ref)
        session = self._bound(grant).session
        kept = await self._keep(session)
        if kept is None:
            self.lost[owner] = "its Consul session ran out or was destroyed"
        elif isinstance(kept, str):
            self.unknown[owner] = kept
        else:
            key = ref.key.encode()
            self._asked.append((grant.claim, requests.locked_by(key, session), grant, 0))

    async def _waiting(self, waiting: Waiting) -> None:
        claim = waiting.claim
        session = self._renewer_thread.sessions.current(claim.ttl)
        kept = None if session is None else await self._keep(session.id)
        if session is None or kept is None:
            self.forgotten.add(claim.owner)
        elif not isinstance(kept, str):
            key = self._store.names.of(claim.name).entry(claim)
            op = requests.locked_by(key, session.id)
            self._asked.append((claim, op, None, waiting.behind))

    async def _look(self, asked: list[tuple[Claim, bytes, Grant | None, int]]) -> None:
        body = requests.txn(*(op for _, op, _, _ in asked))
        failed: frozenset[int] = frozenset()
        try:
            await self._renewer_thread.agent.txn(body, line=READ, until=self._until)
        except Refused as refused:
            failed = refused.failed
        except BackendUnavailable as error:
            self.unknown |= {c.owner: str(error) for c, _, grant, _ in asked if grant is not None}
            return
        for index, (claim, _, grant, behind) in enumerate(asked):
            if grant is None and index in failed:
                self.forgotten.add(claim.owner)
            elif grant is not None and index in failed:
                await self._find(grant)
            elif grant is None:
                await self._tell_behind(claim, behind)
            elif self._is_to_move(self._bound(grant).ttl, whole(claim.ttl)):
                await self._move(grant, self._bound(grant))

    async def _find(self, grant: Grant) -> None:
        """A hold is not where it should be: an extend without an answer may have moved it."""
        claim, moving = grant.claim, self._store.moving.get(grant.claim.owner)
        kept = None if moving is None else await self._keep(moving.session)
        if moving is None or kept is None:
            self.lost[claim.owner] = BROKEN
            return
        try:
            if isinstance(kept, str):
                raise BackendUnavailable(kept)
            body = requests.txn(requests.locked_by(moving.key.encode(), moving.session))
            await self._renewer_thread.agent.txn(body, line=READ, until=self._until)
        except Refused:
            self.lost[claim.owner] = BROKEN
        except BackendUnavailable as error:
            self.unknown[claim.owner] = str(error)
        else:
            self._store.moved[claim.owner] = moving
            if self._is_to_move(moving.ttl, whole(claim.ttl)):
                await self._move(grant, moving)

    def _is_to_move(self, bound: int, ttl: int) -> bool:
        """Whether a hold goes to another session: to a shorter one only if its owner asks for that,
        since a request may arrive after later ones."""
        return bound != ttl if self._shorten else bound < ttl

    async def _tell_behind(self, claim: Claim, behind: int) -> None:
        """Writes how many wait behind an entry that was not granted meanwhile."""
        place = self._store.places.get(claim.owner)
        if place is None or place.behind == behind:
            return
        key = self._store.names.of(claim.name).entry(claim)
        value = requests.entry_value(claim, place.since, behind=behind)
        change = requests.rewrite(key, value, place.changed)
        try:
            answer = await self._renewer_thread.agent.txn(requests.txn(change), until=self._until)
        except (BackendUnavailable, Refused, SessionGone):
            return
        if self._store.places.get(claim.owner) is place:  # neither granted nor gone meanwhile
            changed = int(answer[0]["ModifyIndex"])
            self._store.places[claim.owner] = place._replace(behind=behind, changed=changed)

    def _bound(self, grant: Grant) -> Ref:
        """Where the hold is now."""
        return self._store.moved.get(grant.claim.owner) or Ref(*grant.ref)

    async def _move(self, grant: Grant, ref: Ref) -> None:
        """Binds a hold whose ttl was changed to the session of its new ttl."""
        claim = grant.claim
        try:
            session = await self._renewer_thread.session(claim.ttl, self._until)
            # Its holder counts with the whole ttl, if it never hears an answer.
            kept = await self._keep(session.id)
            if isinstance(kept, str):
                raise BackendUnavailable(kept)
            value = requests.entry_value(
                claim, self._renewer_thread.runtime.wall(), token=grant.token
            )
            keys, move = self._store.names.of(claim.name), requests.Move(ref.session, session.id)
            body = requests.moving(keys, claim, value, grant.slots, move)
            moved = self._store.moving[claim.owner] = Ref(ref.key, session.id, session.ttl)
            await self._renewer_thread.agent.txn(body, until=self._until)
        except Refused:
            self.lost[claim.owner] = BROKEN
        except (BackendUnavailable, SessionGone) as error:
            self.unknown[claim.owner] = str(error) or "the new session ended at once"
        else:
            self._store.moved[claim.owner] = moved
            self._store.moving.pop(claim.owner, None)
            self._certain(session.since)

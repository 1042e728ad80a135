"""What both advisory stores share: a hold is a session that has the lock of a name on the server.

A claim that does not fit sends a request that waits on the server; a later attempt reads its reply.
The server ends a session that is idle for its ttl, and every renewal restarts that time. It runs
from the moment of the grant, which may be as early as the request: a grant that may be old is
renewed before ``attempt`` returns it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import Any, Generic, TypeVar

from holdfast.claim import Busy, Claim, Grant
from holdfast.core.backoff import WATCH_POLL_SECONDS
from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores._sql.connection import Dial, Dropped, SqlConnection, SqlPool, world_of
from holdfast.stores._sql.purge import attempts_until_purge
from holdfast.stores._sql.session import (
    SessionDriver,
    SessionFailures,
    SessionRegistry,
    SqlSession,
    ended,
)

__all__ = ["RECHECK_SECONDS", "AdvisoryBackend"]

C = TypeVar("C", bound=SqlConnection)

LOST = "its connection to the server is gone"
RECHECK_SECONDS = 1.0
"""How often the first waiter for slots attempts again: a killed holder sends no wake-up."""
ABANDON_POLL_SECONDS = 0.005
"""How often ``abandon`` checks whether an attempt for the same owner has ended."""
FRESH_SHARE = 0.1
"""The part of a ttl that may be over when a grant is returned without a renewal."""


class AdvisoryBackend(ABC, Generic[C]):
    """Attempts, waits, renewals and releases by sessions."""

    def __init__(
        self,
        runtime: Runtime,
        pool: SqlPool[Any, Any],
        sessions: SessionRegistry[C],
        dial: Dial[C],
        seconds: float,
    ) -> None:
        self.runtime, self.pool, self.sessions = runtime, pool, sessions
        self.driver = SessionDriver(world_of(runtime))
        self._dial, self._seconds = dial, seconds
        self._until_purge = attempts_until_purge()
        self._nudged: set[str] = set()
        """Owners that were nudged before they had a session to wait on."""
        self._closed = False

    # ---- what a store does in its own way

    @abstractmethod
    async def _take(self, session: SqlSession[C], claim: Claim, *, join: bool) -> Grant | Busy:
        """Takes the name if it is free, on a session that holds nothing."""

    @abstractmethod
    def _enqueue(self, session: SqlSession[C], claim: Claim) -> None:
        """Sends the request that waits on the server."""

    @abstractmethod
    async def _resume(self, session: SqlSession[C], claim: Claim) -> Grant | Busy | None:
        """Returns the result of a claim that waits on a session; None if the session broke."""

    @abstractmethod
    async def _had_ended(self, owner: str, error: BackendUnavailable, until: float) -> bool:
        """Whether an idle session had ended before it was used, so that another one can be used at
        once. Its own end is certain then."""

    @abstractmethod
    async def _wait(self, session: SqlSession[C], claim: Claim, busy: Busy, until: float) -> None:
        """Waits on the session of a claim."""

    @abstractmethod
    async def _release(self, session: SqlSession[C], grant: Grant) -> bool:
        """Releases what a session holds; returns whether it was held."""

    @abstractmethod
    async def _leave(self, session: SqlSession[C], claim: Claim) -> None:
        """Ends what a session holds or waits for, and keeps the session."""

    @abstractmethod
    async def _end_session(self, connection: C, until: float) -> None:
        """Ends the session of a connection that broke, on the server."""

    @abstractmethod
    def _touch(self, session: SqlSession[C], claim: Claim) -> Any:
        """Returns the request that renews a session: any statement resets its idle time. If the
        ttl differs from before, the request also changes the idle timeout."""

    @abstractmethod
    async def _purge(self, until: float | None = None) -> None:
        """Drops idle names, in a bounded step, if it is time for that."""

    # ---- attempts

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        # Two attempts of one claim at the same time would use one session: only one of them runs.
        attempting, mark = self.sessions.attempting, object()
        if attempting.setdefault(claim.owner, mark) is not mark:
            return Busy(0, RECHECK_SECONDS)
        try:
            return await self._attempt(claim, join, inf if until is None else until)
        finally:
            del attempting[claim.owner]
            session = self.sessions.by_owner.get(claim.owner)
            if session is not None:
                session.until = inf
                if session.grant is not None:
                    self._nudged.discard(claim.owner)  # no wait follows

    async def _attempt(self, claim: Claim, join: bool, until: float) -> Grant | Busy:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.until = until
            result = await self._continue(session, claim)
            if result is not None:
                return result
        if claim.owner in self.sessions.unknown:
            await self._end_unknown(claim.owner, until)
        self._until_purge -= 1
        session = self.sessions.borrow()
        if session is not None:
            session.until = until
            try:
                return await self._begin(session, claim, join)
            except BackendUnavailable as error:
                if not await self._had_ended(claim.owner, error, until):
                    raise
        session = await self.driver.open(self._dial, min(until, now() + self._seconds))
        session.until = until
        return await self._begin(session, claim, join)

    async def _begin(self, session: SqlSession[C], claim: Claim, join: bool) -> Grant | Busy:
        """Sends the first request for a claim, on a session that holds nothing."""
        self.sessions.by_owner[claim.owner] = session
        result = await self._take(session, claim, join=join)
        if isinstance(result, Busy):
            if not join:
                self.sessions.by_owner.pop(claim.owner, None)
                self.sessions.give_back(session)
            elif not session.at_head and not session.pending:
                self._enqueue(session, claim)
        return result

    async def _continue(self, session: SqlSession[C], claim: Claim) -> Grant | Busy | None:
        """Returns the result of a claim that has a session already; None if its session broke."""
        if session.grant is None:
            return await self._resume(session, claim)
        lost, unknown = await self._renew_sessions([session.grant], session.until)
        if unknown:
            raise BackendUnavailable(unknown[claim.owner])
        return None if lost else session.grant

    async def _admitted(
        self, session: SqlSession[C], claim: Claim, grant: Grant
    ) -> Grant | Busy | None:
        """Returns the grant of a claim that has waited on the server; renews a grant that is
        old."""
        session.grant = grant
        old = now() - session.queued_at > FRESH_SHARE * claim.ttl
        if old or ended([session]):  # it may have been broken before its answer was read
            return await self._continue(session, claim)
        return grant._replace(since=session.queued_at)

    async def _request(self, session: SqlSession[C], request: Any) -> Any:
        by = min(session.until, now() + self._seconds)
        return await self.driver.request(session, request, by)

    def _send(self, session: SqlSession[C], claim: Claim, request: Any) -> None:
        """Sends a request that may wait on the server. Its reply is read later."""
        try:
            session.connection.send(request)
        except BackendUnavailable:
            self.sessions.lose(claim.owner, session)
            raise
        session.pending = True

    async def _end_unknown(self, owner: str, until: float = inf) -> None:
        """Ends the sessions of an owner whose state is unknown."""
        await self.sessions.end_unknown(owner, lambda made: self._end_session(made, until))

    # ---- waiting

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        if claim.owner in self._nudged:
            self._nudged.discard(claim.owner)
            return
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None and session.grant is None:
            await self._wait(session, claim, busy, until)

    def nudge(self, claim: Claim) -> None:
        session = self.sessions.by_owner.get(claim.owner)
        if session is not None:
            session.nudge()
        elif claim.owner in self.sessions.attempting:
            self._nudged.add(claim.owner)

    # ---- renewals

    def _kept(self, session: SqlSession[C], grant: Grant) -> None:
        """Called after ``_touch`` succeeded for this grant, whose ttl may have changed."""
        session.grant = grant

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Returns the owners whose session has ended, with a reason. Reads sockets only."""
        lost: dict[str, str] = {}
        watched: dict[SqlSession[C], str] = {}
        for grant in grants:
            session = self.sessions.by_owner.get(grant.claim.owner)
            if session is None:
                lost[grant.claim.owner] = LOST
            else:
                watched[session] = grant.claim.owner
        for session in ended(list(watched)):
            self.sessions.lose(watched[session], session)
            lost[watched[session]] = LOST
        return lost

    async def _renew_sessions(
        self, grants: Sequence[Grant], until: float, shorten: bool = False
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Sends one request on each session, all at once; returns the lost and the unknown
        holds."""
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        renewed: dict[SqlSession[C], Grant] = {}
        locked: list[SqlSession[C]] = []
        try:
            for grant in grants:
                session = self._lock_holder(grant.claim.owner, locked, lost, unknown)
                if session is not None and session.grant is not None:
                    longer = grant.claim.ttl > session.grant.claim.ttl
                    renewed[session] = grant if longer or shorten else session.grant
            requests = {each: self._touch(each, kept.claim) for each, kept in renewed.items()}
            by = min(until, now() + self._seconds)
            self._renewed(renewed, await self.driver.request_all(requests, by), lost, unknown)
        finally:
            for session in locked:
                session.mutex.release()
        return lost, unknown

    def _lock_holder(
        self,
        owner: str,
        locked: list[SqlSession[C]],
        lost: dict[str, str],
        unknown: dict[str, str],
    ) -> SqlSession[C] | None:
        """Acquires the mutex of the session that holds for an owner. Returns None if there is no
        such session, or if it is in use."""
        session = self.sessions.by_owner.get(owner)
        if session is not None and not session.mutex.acquire(blocking=False):
            unknown[owner] = "its connection is in use"
            return None
        if session is not None:
            locked.append(session)
            # A release may have made it idle since the look above, and another claim may have it.
            current = self.sessions.by_owner.get(owner) is session
            if current and session.grant is not None and session.connection.open:
                return session
        lost[owner] = LOST
        return None

    def _renewed(
        self,
        renewed: dict[SqlSession[C], Grant],
        failed: SessionFailures,
        lost: dict[str, str],
        unknown: dict[str, str],
    ) -> None:
        """Applies the results of a renewal; with the mutexes of the sessions: a release that waits
        for one of them makes the session idle."""
        for session, grant in renewed.items():
            owner = grant.claim.owner
            if session not in failed:
                self._kept(session, grant)
            elif session.connection.open:
                unknown[owner] = str(failed[session])
            else:
                self.sessions.lose(owner, session)
                lost[owner] = LOST

    # ---- ends

    async def release(self, grant: Grant) -> bool | None:
        owner = grant.claim.owner
        session = self.sessions.by_owner.get(owner)
        held = None if session is None else session.grant
        if session is None or held is None:
            return False
        if self.sessions.by_owner.pop(owner, None) is None:  # the client was closed just now
            return False
        gone = bool(ended([session]))
        try:
            ours = await self._release(session, held)
        except Dropped:
            self.sessions.lose(owner, session)
            await self._end_unknown(owner)
            return False if gone else None  # it may have run before the connection was cut
        except BaseException:
            self.sessions.lose(owner, session)
            raise
        if ours:
            self.sessions.give_back(session)
        else:
            session.connection.close()
        await self._purge()
        return ours

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        by = now() + self._seconds
        if until is not None:
            by = min(by, until)
        while claim.owner in self.sessions.attempting and now() < by:
            await self.runtime.sleep(ABANDON_POLL_SECONDS)  # after the attempt that is running
        self._nudged.discard(claim.owner)
        session = self.sessions.by_owner.pop(claim.owner, None)
        if session is not None:
            try:
                session.until = by
                await self._leave(session, claim)
            except BackendUnavailable:
                self.sessions.lose(claim.owner, session)
            except BaseException:
                self.sessions.lose(claim.owner, session)
                raise
        if claim.owner in self.sessions.unknown:
            await self._end_unknown(claim.owner, by)

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(*WATCH_POLL_SECONDS))
        await self.runtime.sleep(max(0.0, pause))

    def forget(self) -> None:
        self._until_purge = attempts_until_purge()
        self.sessions.forget()
        self.driver.forget()
        self.pool.forget()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.sessions.remove_user()
            self.driver.close()
        self.pool.close()

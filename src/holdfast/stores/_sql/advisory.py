"""What both advisory stores share: the renewal of sessions that hold locks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from holdfast.claim import Claim, Grant
from holdfast.stores._sql.connection import SqlConnection
from holdfast.stores._sql.session import SessionRegistry, SqlSession, ended
from holdfast.stores._sql.session_blocking import SessionDriver, SessionRequests

__all__ = ["SessionKeepAlive"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
C = TypeVar("C", bound=SqlConnection[Any, Any])

LOST = "its connection to the server is gone"


class SessionKeepAlive(ABC, Generic[C, Request, Answer]):
    """Renews holds, each of which is a session of its own."""

    def __init__(
        self, sessions: SessionRegistry[C], driver: SessionDriver[Request, Answer]
    ) -> None:
        self._sessions, self._driver = sessions, driver

    @abstractmethod
    def touch(self, session: SqlSession[C], claim: Claim) -> Request:
        """Returns the request that renews a session: any statement resets its idle time. If the
        ttl differs from before, the request also changes the idle timeout."""

    def kept(self, session: SqlSession[C], grant: Grant) -> None:
        """Called after ``touch`` succeeded for this grant, whose ttl may have changed."""
        session.grant = grant

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Returns the owners whose session has ended, with a reason. Reads sockets only."""
        lost: dict[str, str] = {}
        watched: dict[SqlSession[C], str] = {}
        for grant in grants:
            session = self._sessions.by_owner.get(grant.claim.owner)
            if session is None:
                lost[grant.claim.owner] = LOST
            else:
                watched[session] = grant.claim.owner
        for session in ended(list(watched)):
            self._sessions.lose(watched[session], session)
            lost[watched[session]] = LOST
        return lost

    async def renew(
        self, grants: Sequence[Grant], until: float, shorten: bool = False
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Sends one request on each session and returns the lost and the unknown holds. Threads
        send all at once; an event loop one after the other, as it only has one (``extend``)."""
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        requests: SessionRequests[Request, Answer] = {}
        renewed: dict[SqlSession[C], Grant] = {}
        for grant in grants:
            session = self._sessions.by_owner.get(grant.claim.owner)
            if session is None or session.grant is None or not session.connection.open:
                lost[grant.claim.owner] = LOST
            elif not session.mutex.acquire(blocking=False):
                unknown[grant.claim.owner] = "its connection is in use"
            else:
                longer = grant.claim.ttl > session.grant.claim.ttl
                kept = grant if longer or shorten else session.grant
                requests[session] = self.touch(session, kept.claim)
                renewed[session] = kept
        try:
            failed = await self._driver.request_all(requests, until)
        finally:
            for session in renewed:
                session.mutex.release()
        for session, grant in renewed.items():
            owner = grant.claim.owner
            if session not in failed:
                self.kept(session, grant)
            elif session.connection.open:
                unknown[owner] = str(failed[session])
            else:
                self._sessions.lose(owner, session)
                lost[owner] = LOST
        return lost, unknown

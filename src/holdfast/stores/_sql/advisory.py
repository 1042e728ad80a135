"""How sessions that hold locks are kept alive, whichever server they are on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from holdfast.claim import Claim, Grant
from holdfast.stores._sql.connection import Connection
from holdfast.stores._sql.session import Session, Sessions, ended
from holdfast.stores._sql.session_blocking import Asked, Talk

__all__ = ["Keeping"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
C = TypeVar("C", bound=Connection[Any, Any])

LOST = "its connection to the server is gone"


class Keeping(ABC, Generic[C, Request, Answer]):
    """Renews holds: each is a session of its own."""

    def __init__(self, sessions: Sessions[C], talk: Talk[Request, Answer]) -> None:
        self._sessions, self._talk = sessions, talk

    @abstractmethod
    def touch(self, session: Session[C], claim: Claim) -> Request:
        """What keeps a session alive: anything; or what changes how long it may be idle."""

    def kept(self, session: Session[C], grant: Grant) -> None:
        """It was touched for this grant, whose ttl may be another than before."""
        session.grant = grant

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Whose session has ended: its socket says so before anybody asks."""
        lost: dict[str, str] = {}
        watched: dict[Session[C], str] = {}
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
        """One question on each session, all at once; over asyncio, where there is only ever one
        (``extend``), one after the other."""
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        asked: Asked[Request, Answer] = {}
        renewed: dict[Session[C], Grant] = {}
        for grant in grants:
            session = self._sessions.by_owner.get(grant.claim.owner)
            if session is None or session.grant is None or not session.connection.open:
                lost[grant.claim.owner] = LOST
            elif not session.mutex.acquire(blocking=False):
                unknown[grant.claim.owner] = "its connection is in use"
            else:
                longer = grant.claim.ttl > session.grant.claim.ttl
                kept = grant if longer or shorten else session.grant
                asked[session] = self.touch(session, kept.claim)
                renewed[session] = kept
        try:
            failed = await self._talk.ask_all(asked, until)
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

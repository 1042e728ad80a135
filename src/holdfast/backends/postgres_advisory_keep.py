"""How sessions that hold advisory locks are kept alive."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg.pq.abc import PGresult

from holdfast.backends.postgres_advisory_requests import AdvisoryStatements
from holdfast.claim import Claim, Grant
from holdfast.wires.postgres import Session, Sessions
from holdfast.wires.postgres_statement import Request
from holdfast.wires.sql_session import ended
from holdfast.wires.sql_talk import Asked, Talk

__all__ = ["Keeping"]

LOST = "its connection to the server is gone"


class Keeping:
    """Renews holds: each is a session of its own."""

    def __init__(
        self,
        sessions: Sessions,
        talk: Talk[Request, PGresult],
        statements: AdvisoryStatements,
        namespace: bytes,
    ) -> None:
        self._sessions, self._talk, self._statements = sessions, talk, statements
        self._namespace = namespace

    def glance(self, grants: Sequence[Grant]) -> dict[str, str]:
        """Whose session has ended: its socket says so before anybody asks."""
        lost: dict[str, str] = {}
        watched: dict[Session, str] = {}
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
        self, grants: Sequence[Grant], until: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """One question on each session, all at once; over asyncio, where there is only ever one
        (``extend``), one after the other."""
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        asked: Asked[Request, PGresult] = {}
        renewed: dict[Session, Grant] = {}
        for grant in grants:
            session = self._sessions.by_owner.get(grant.claim.owner)
            if session is None or session.grant is None or not session.connection.open:
                lost[grant.claim.owner] = LOST
            elif not session.mutex.acquire(blocking=False):
                unknown[grant.claim.owner] = "its connection is in use"
            else:
                asked[session] = self._touch(session, grant.claim)
                renewed[session] = grant
        try:
            failed = await self._talk.ask_all(asked, until)
        finally:
            for session in renewed:
                session.mutex.release()
        for session, grant in renewed.items():
            owner = grant.claim.owner
            if session not in failed:
                session.grant = grant
            elif session.connection.open:
                unknown[owner] = str(failed[session])
            else:
                self._sessions.lose(owner, session)
                lost[owner] = LOST
        return lost, unknown

    def _touch(self, session: Session, claim: Claim) -> Request:
        """What keeps a session alive: anything; or what changes how long it may be idle."""
        if session.grant is not None and session.grant.claim.ttl == claim.ttl:
            return self._statements.touch, ()
        parameters = (self._namespace, claim.name.encode(), b"%.6f" % claim.ttl)
        return self._statements.set_ttl, parameters

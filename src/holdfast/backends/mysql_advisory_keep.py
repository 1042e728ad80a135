"""How sessions that hold named locks are kept alive."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.backends.mysql_advisory_sql import AdvisoryStatements
from holdfast.claim import Claim, Grant
from holdfast.wires.mysql import Session, Sessions
from holdfast.wires.mysql_protocol import Reply
from holdfast.wires.mysql_talk import Talk
from holdfast.wires.sql_session import ended
from holdfast.wires.sql_talk import Asked

__all__ = ["Keeping"]

LOST = "its connection to the server is gone"


class Keeping:
    """Renews holds: each is a session of its own."""

    def __init__(self, sessions: Sessions, talk: Talk, statements: AdvisoryStatements) -> None:
        self._sessions, self._talk, self._statements = sessions, talk, statements

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
        """One question on each session, all at once."""
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        asked: Asked[bytes, Reply] = {}
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
                session.connection.ttl = max(1, math.ceil(grant.claim.ttl))
            elif session.connection.open:
                unknown[owner] = str(failed[session])
            else:
                self._sessions.lose(owner, session)
                lost[owner] = LOST
        return lost, unknown

    def _touch(self, session: Session, claim: Claim) -> bytes:
        """What keeps a session alive: anything; or what changes how long it may be idle."""
        if session.grant is not None and session.grant.claim.ttl == claim.ttl:
            return b"DO 0"
        wait = b"SET SESSION wait_timeout = %d" % max(1, math.ceil(claim.ttl))
        return wait + b"; " + self._statements.set_ttl(claim)

"""How sessions that hold named locks are kept alive."""

from __future__ import annotations

import math

from holdfast.claim import Claim, Grant
from holdfast.stores._sql import advisory as sql_advisory_keep
from holdfast.stores.mysql.connection import Connection, Session, Sessions
from holdfast.stores.mysql.protocol import Reply
from holdfast.stores.mysql_advisory.session import Talk
from holdfast.stores.mysql_advisory.sql import AdvisoryStatements

__all__ = ["Keeping"]


class Keeping(sql_advisory_keep.SessionKeepAlive[Connection, bytes, Reply]):
    """A session may be idle for its ``wait_timeout``."""

    def __init__(self, sessions: Sessions, talk: Talk, statements: AdvisoryStatements) -> None:
        super().__init__(sessions, talk)
        self._statements = statements

    def touch(self, session: Session, claim: Claim) -> bytes:
        if session.grant is not None and session.grant.claim.ttl == claim.ttl:
            return b"DO 0"
        wait = b"SET SESSION wait_timeout = %d" % max(1, math.ceil(claim.ttl))
        return wait + b"; " + self._statements.set_ttl(claim)

    def kept(self, session: Session, grant: Grant) -> None:
        super().kept(session, grant)
        session.connection.ttl = max(1, math.ceil(grant.claim.ttl))

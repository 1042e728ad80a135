"""How sessions that hold advisory locks are kept alive."""

from __future__ import annotations

from psycopg.pq.abc import PGresult

from holdfast.claim import Claim
from holdfast.stores._sql import advisory as sql_advisory_keep
from holdfast.stores._sql.session_blocking import SessionDriver
from holdfast.stores.postgres.connection import (
    PostgresConnection,
    PostgresSession,
    PostgresSessions,
)
from holdfast.stores.postgres.statement import Request
from holdfast.stores.postgres_advisory.requests import AdvisoryStatements

__all__ = ["Keeping"]


class Keeping(sql_advisory_keep.SessionKeepAlive[PostgresConnection, Request, PGresult]):
    """A session may be idle for its ``idle_session_timeout``."""

    def __init__(
        self,
        sessions: PostgresSessions,
        driver: SessionDriver[Request, PGresult],
        statements: AdvisoryStatements,
        namespace: bytes,
    ) -> None:
        super().__init__(sessions, driver)
        self._statements, self._namespace = statements, namespace

    def touch(self, session: PostgresSession, claim: Claim) -> Request:
        if session.grant is not None and session.grant.claim.ttl == claim.ttl:
            return self._statements.touch, ()
        parameters = (self._namespace, claim.name.encode(), b"%.6f" % claim.ttl)
        return self._statements.set_ttl, parameters

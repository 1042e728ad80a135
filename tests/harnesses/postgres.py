"""``postgresql://`` in both modes: a server and a fault proxy before it."""

from __future__ import annotations

from harnesses.served import ServedHarness
from servers.postgres import PostgresServer
from servers.process import Server

__all__ = ["HARNESSES"]


class PostgresHarness(ServedHarness):
    """Lease rows."""

    name = "postgres"

    def make_server(self) -> Server:
        return PostgresServer()


class AdvisoryHarness(PostgresHarness):
    """Advisory locks."""

    name = "postgres-advisory"
    suffix = "?mode=advisory"


HARNESSES = (PostgresHarness, AdvisoryHarness)

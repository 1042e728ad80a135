"""``mysql://`` in both modes: a server and a fault proxy before it."""

from __future__ import annotations

from harnesses.served import ServedHarness
from servers.mysql import MySQLServer
from servers.process import Server

__all__ = ["HARNESSES"]


class MySQLHarness(ServedHarness):
    """Lease rows."""

    name = "mysql"
    ttl = 1.0

    def make_server(self) -> Server:
        return MySQLServer()


class AdvisoryHarness(MySQLHarness):
    """Named locks."""

    name = "mysql-advisory"
    suffix = "?mode=advisory"


HARNESSES = (MySQLHarness, AdvisoryHarness)

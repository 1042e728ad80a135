"""``consul://``: one server with a low floor for session ttls, and a fault proxy before it."""

from __future__ import annotations

from harnesses.served import ServedHarness
from servers.consul import ConsulServer
from servers.process import Server

__all__ = ["HARNESSES"]


class ConsulHarness(ServedHarness):
    """One server. Consul ends a session one to two ttls after its last renewal."""

    name = "consul"
    ttl = 1.0
    extra_recovery = 3.0
    outage_recovery = 15.0
    suffix = "?session_ttl_min=1"

    def make_server(self) -> Server:
        return ConsulServer()


HARNESSES = (ConsulHarness,)

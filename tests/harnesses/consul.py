"""``consul://``: one server and three, with a low floor for session ttls, and fault proxies."""

from __future__ import annotations

from harnesses.served import ELECTION_SECONDS, EnsembleHarness, ServedHarness
from servers.consul import ConsulServer, ConsulTrio
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


class ConsulThreeHarness(EnsembleHarness):
    """Three servers. One that comes to lead gives every session its time again."""

    name = "consul-three"
    repeats = scheme = "consul"
    ttl = ConsulHarness.ttl
    extra_recovery = ConsulHarness.extra_recovery + 2 * ttl + ELECTION_SECONDS
    outage_recovery = ConsulHarness.outage_recovery
    suffix = ConsulHarness.suffix

    def make_servers(self) -> ConsulTrio:
        return ConsulTrio()


HARNESSES = (ConsulHarness, ConsulThreeHarness)

"""``etcd://``: one node of Debian's version, three of the next, and a fault proxy before each."""

from __future__ import annotations

from harnesses.served import ELECTION_SECONDS, EnsembleHarness, ServedHarness
from servers.etcd import EtcdServer, EtcdTrio
from servers.process import Server

__all__ = ["HARNESSES"]


class EtcdHarness(ServedHarness):
    """One node; its leases have at least two seconds, and a restarted one renews them all."""

    name = "etcd"
    ttl = 2.0
    extra_recovery = 3.0

    def make_server(self) -> Server:
        return EtcdServer()


class EtcdThreeHarness(EnsembleHarness):
    """Three nodes. One that comes to lead gives every lease its ttl again."""

    name = "etcd-three"
    repeats = scheme = "etcd"
    ttl = EtcdHarness.ttl
    extra_recovery = EtcdHarness.extra_recovery + ttl + ELECTION_SECONDS
    outage_recovery = 15.0

    def make_servers(self) -> EtcdTrio:
        return EtcdTrio(version="3.5")


HARNESSES = (EtcdHarness, EtcdThreeHarness)

"""``etcd://``: one node of Debian's version, and a fault proxy before it."""

from __future__ import annotations

from harnesses.served import ServedHarness
from servers.etcd import EtcdServer
from servers.process import Server

__all__ = ["HARNESSES"]


class EtcdHarness(ServedHarness):
    """One node; its leases have at least two seconds, and a restarted one renews them all."""

    name = "etcd"
    ttl = 2.0
    extra_recovery = 3.0

    def make_server(self) -> Server:
        return EtcdServer()


HARNESSES = (EtcdHarness,)

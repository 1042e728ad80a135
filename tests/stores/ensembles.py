"""Clusters of three servers of etcd, Consul or ZooKeeper, and their documented recovery times.

A test module imports the fixtures by name: ``kind, trio = ensembles.kind, ensembles.trio``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from servers.registry import Servers
from stores.network_partitions import LinkedConsulTrio, LinkedEtcdTrio
from stores.recovery import Bound
from stores.zookeeper.helpers import TICK_SECONDS, LinkedZooKeeperTrio

__all__ = ["KINDS", "SENT_AGAIN", "Kind", "every_kind", "kind", "trio"]

REQUEST = 5.0
"""The timeout of a request. Over HTTP all hosts of a URL share it."""
SENT_AGAIN = 2.0
"""The longest time until the request is sent again."""
ETCD_ELECTION = 1.0
ETCD_CHECK = 0.5
"""How often etcd checks for expired leases."""
ZOOKEEPER_SESSION = 1.1 * 2.0 + 2 * TICK_SECONDS
"""The session timeout, as the servers round it."""


class Kind(NamedTuple):
    """The cluster of a store, and the documented times."""

    trio: Any
    ttl: float
    session: float
    """How long a hold outlives its client, without an election."""
    restarted: float
    """The same, counted from an election of a leader."""
    again: float
    """When a request that two hosts lost in an election is sent again."""
    longest: float
    """A ttl that is longer than any election."""
    grants: dict[str, tuple[bytes, ...]]
    """Bytes that occur in the requests for a lock and for a semaphore."""

    @property
    def asked(self) -> Bound:
        """The bound for a name that is free, or that its holder releases."""
        return Bound(self.again, self.again)

    @property
    def elected(self) -> Bound:
        """The bound for a name whose holder is gone, after an election. A request that comes too
        early in an election is sent a second time."""
        seconds = max(self.restarted, self.again)
        return Bound(seconds, seconds)

    @property
    def ended(self) -> Bound:
        """The bound for a name whose holder is gone, without an election."""
        return self.elected._replace(seconds=self.session)


KINDS = {
    "etcd": Kind(
        LinkedEtcdTrio,
        ttl=3.0,
        session=3.0 + ETCD_CHECK,
        restarted=ETCD_ELECTION + 3.0 + ETCD_CHECK,
        again=REQUEST / 2 + SENT_AGAIN,
        longest=60.0,
        grants={"lock": (b"/etcdserverpb.KV/Txn",), "semaphore": (b"/etcdserverpb.KV/Txn",)},
    ),
    "consul": Kind(
        LinkedConsulTrio,
        ttl=2.0,
        session=2 * 2.0,
        restarted=2 * 2.0,
        again=REQUEST / 2 + SENT_AGAIN,
        longest=60.0,
        grants={"lock": (b"/locks/name/",), "semaphore": (b"/locks/name/",)},
    ),
    "zookeeper": Kind(
        LinkedZooKeeperTrio,
        ttl=2.0,
        session=ZOOKEEPER_SESSION,
        restarted=ZOOKEEPER_SESSION,
        again=REQUEST + SENT_AGAIN,
        longest=30.0,
        grants={"lock": (b"/name/1.x",), "semaphore": (b"/name/1.n", b"/name/1.k.")},
    ),
}
every_kind = pytest.mark.parametrize("store", list(KINDS))


@pytest.fixture
def kind(store: str) -> Kind:
    return KINDS[store]


@pytest.fixture
def trio(kind: Kind, servers: Servers) -> Iterator[Any]:
    """A cluster; it is repaired after each test."""
    running = servers.of(kind.trio)
    yield running
    running.mend()

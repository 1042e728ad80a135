"""Three servers of etcd, Consul or ZooKeeper, and what is documented of their recovery.

Fixtures are taken over by name: ``kind, trio = ensembles.kind, ensembles.trio``.
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
"""After what a request without an answer is given up. Over HTTP the hosts of a URL share it."""
SENT_AGAIN = 2.0
"""Within what it is sent again."""
ETCD_ELECTION = 1.0
ETCD_CHECK = 0.5
"""How often etcd looks for leases that have ended."""
ZOOKEEPER_SESSION = 1.1 * 2.0 + 2 * TICK_SECONDS
"""After what a session ends, as the servers round it."""


class Kind(NamedTuple):
    """A store's three servers, and the pages of the documentation in numbers."""

    trio: Any
    ttl: float
    session: float
    """A hold whose holder is gone has ended after so long, where one leader goes on."""
    restarted: float
    """The same, counted from an election."""
    again: float
    """A request that two hosts have swallowed in an election is sent again after so long."""
    longest: float
    """A ttl that no election outlasts."""
    grants: dict[str, tuple[bytes, ...]]
    """What the requests for a lock and for a semaphore have in them."""

    @property
    def asked(self) -> Bound:
        """For what is free, or will be given back."""
        return Bound(self.again, self.again)

    @property
    def elected(self) -> Bound:
        """For what somebody held who is gone, after an election. Who asks too early in one asks
        once more."""
        seconds = max(self.restarted, self.again)
        return Bound(seconds, seconds)

    @property
    def ended(self) -> Bound:
        """The same without one."""
        return self.elected._replace(seconds=self.session)


KINDS = {
    "etcd": Kind(
        LinkedEtcdTrio,
        ttl=3.0,
        session=3.0 + ETCD_CHECK,
        restarted=ETCD_ELECTION + 3.0 + ETCD_CHECK,
        again=REQUEST / 2 + SENT_AGAIN,
        longest=60.0,
        grants={"lock": (b"/v3/kv/txn",), "semaphore": (b"/v3/kv/txn",)},
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
    """Whatever a test did to it, the next one finds it whole."""
    running = servers.of(kind.trio)
    yield running
    running.mend()

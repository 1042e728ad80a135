"""Three ZooKeeper servers, and what happens to them and to their sessions alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

import holdfast
from backends.recovery import SOON, Believer, Tell, recovers
from backends.zookeeper_bench import TICK_SECONDS, LinkedZooKeeperTrio, QuickServer
from holdfast.runtimes.clock import now
from holdfast.wires.zookeeper_asks import Create
from servers.proxy import Proxy
from servers.registry import Servers

pytestmark = pytest.mark.faults

TTL = 2.0
SESSION = 1.1 * TTL + 2 * TICK_SECONDS
"""After what a session ends, as the servers round it. A new leader counts it anew."""


@pytest.fixture
def trio(servers: Servers) -> Iterator[LinkedZooKeeperTrio]:
    running = servers.of(LinkedZooKeeperTrio)
    yield running
    running.mend()


@pytest.mark.parametrize("turn", range(3))
def test_a_follower_is_cut_off_with_its_client(
    trio: LinkedZooKeeperTrio, namespace: str, turn: int, record_property: Tell
) -> None:
    """The client's server still answers and calls it connected: no proof of anything."""
    lonely = trio.follower()
    with closing(Believer(lonely.url, namespace, "name", TTL)) as believer:
        # At another moment between two renewals each time.
        assert not believer.lost(turn * TTL / 9)
        trio.isolate(lonely)
        url = trio.others(lonely)
        believer.loses(url, namespace, SESSION, record_property)
        trio.join(lonely)


def test_the_leader_is_cut_off_with_its_client(
    trio: LinkedZooKeeperTrio, namespace: str, record_property: Tell
) -> None:
    """An old leader that has not noticed yet answers everything but a write."""
    lonely = trio.leader()
    with closing(Believer(lonely.url, namespace, "name", TTL)) as believer:
        trio.isolate(lonely)
        cut = now()
        assert believer.lost(SOON)
        assert believer.believed_until <= cut + TTL
        trio.join(lonely)
        token, entered = recovers(trio.url, namespace, 2 * SESSION, record_property)
        assert token > believer.token
        assert believer.believed_until <= entered


def test_servers_that_lost_everything(namespace: str) -> None:
    """They refuse a client that has seen more than they know: it starts anew, by itself."""
    with (
        QuickServer() as server,
        holdfast.connect(server.url, namespace=namespace, ttl=TTL) as locks,
    ):
        with locks.lock("name"):
            pass
        server.wipe()
        with locks.lock("name", timeout=60) as lease:
            assert lease.held


def test_a_create_that_lands_late_leaves_nothing(trio: LinkedZooKeeperTrio, namespace: str) -> None:
    """A second node of the same owner, made after its hold was released, is deleted."""
    with Proxy(trio.nodes[0]) as proxy, holdfast.connect(proxy.url, namespace=namespace) as locks:
        with locks.lock("name", ttl=5) as lease:
            pass
        dropped = proxy.drop_next_reply(matching=b"/name/1.x")
        with locks.lock("name", ttl=5) as lease:
            assert dropped.is_set()
            node = lease._hold.grant.ref[2]
        session = locks._door.store.sessions[5]  # type: ignore[attr-defined]
        store = locks._door.store
        session.send(Create(node.rpartition(".")[0] + ".", b"", store.acl))  # type: ignore[attr-defined]
        with locks.lock("name", timeout=20):
            pass


@pytest.mark.parametrize("mode", ["lock", "semaphore"])
def test_the_reply_of_the_create_is_lost(
    trio: LinkedZooKeeperTrio, namespace: str, mode: str
) -> None:
    """The node is found again by its owner: one hold, and nothing left of it afterwards."""
    with Proxy(trio.nodes[0]) as proxy, holdfast.connect(proxy.url, namespace=namespace) as locks:
        lock = locks.lock("name") if mode == "lock" else locks.semaphore("name", 2)
        with lock:
            pass
        for pattern in (b"/name/1.", b"/name/1.k." if mode == "semaphore" else b"/name/1.x"):
            dropped = proxy.drop_next_reply(matching=pattern)
            with lock as lease:
                assert dropped.is_set()
                with holdfast.connect(trio.url, namespace=namespace) as others:
                    standing = others.inspect("name")
                    assert [holder.token for holder in standing.holders] == [lease.token]
                    assert standing.waiters == ()
        with holdfast.connect(trio.url, namespace=namespace) as others:
            standing = others.inspect("name")
            assert (standing.holders, standing.waiters) == ((), ())

"""Faults of three ZooKeeper servers and of their sessions that other stores don't have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast.io.clock import now
from holdfast.stores.zookeeper.client.packets import Create
from holdfast.testing import Flavour
from servers.proxy import Proxy
from servers.registry import Servers
from stores.ensembles import KINDS
from stores.monitored_holders import MonitoredHolders
from stores.recovery import SOON, Tell, client, drive, nothing_is_left
from stores.zookeeper.helpers import LinkedZooKeeperTrio, QuickServer

pytestmark = pytest.mark.faults

ZOOKEEPER = KINDS["zookeeper"]


@pytest.fixture
def trio(servers: Servers) -> Iterator[LinkedZooKeeperTrio]:
    running = servers.of(LinkedZooKeeperTrio)
    yield running
    running.mend()


@pytest.mark.parametrize("run", [1, 2])
def test_a_follower_is_cut_off_at_any_moment(
    trio: LinkedZooKeeperTrio, namespace: str, run: int, record_property: Tell
) -> None:
    """Its clients stay connected and get replies, which prove nothing: their holds are lost."""
    lonely = trio.follower()
    with MonitoredHolders(trio, trio.url_of(lonely), namespace, ZOOKEEPER.ttl) as monitored:
        # At a different moment between two renewals for each parameter.
        assert not monitored.each[0].lost(run * ZOOKEEPER.ttl / 9)
        trio.isolate(lonely)
        monitored.check_lost(ZOOKEEPER.ended, record_property, without=lonely, cut=now())
        trio.mend()
    nothing_is_left(trio, namespace)


def test_servers_that_lost_their_data(namespace: str) -> None:
    """They refuse a client with a newer state than theirs: it opens a new session by itself."""
    with (
        QuickServer() as server,
        holdfast.connect(server.url, namespace=namespace, ttl=ZOOKEEPER.ttl) as locks,
    ):
        with locks.lock("name"):
            pass
        server.wipe()
        with locks.lock("name", timeout=60) as lease:
            assert lease.held


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_create_that_arrives_late_leaves_no_node(
    trio: LinkedZooKeeperTrio, namespace: str, flavour: Flavour
) -> None:
    """A second node of the same owner, created after its hold was released, is deleted."""
    with Proxy(trio.nodes[0]) as proxy:
        drive(flavour, _create_late(proxy, flavour, namespace))
    nothing_is_left(trio, namespace)


async def _create_late(proxy: Proxy, flavour: Flavour, namespace: str) -> None:
    async with client(proxy.url, flavour, namespace, 5.0) as locks:
        async with locks.lock("name"):
            pass
        dropped = proxy.drop_next_reply(matching=b"/name/1.x")
        async with locks.lock("name") as lease:
            assert dropped.is_set()
            node = lease._hold.grant.ref[2]
        store: Any = locks._engine.store
        store.sessions[5].send(Create(node.rpartition(".")[0] + ".", b"", store.acl))
        async with locks.lock("name", timeout=SOON):
            pass


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_record_is_found_through_a_server_that_lags(
    trio: LinkedZooKeeperTrio, namespace: str, flavour: Flavour
) -> None:
    """A job that has run is not run again because a follower has not heard of its record yet."""
    late = trio.follower()
    other = next(node for node in trio.nodes if node is not late)
    drive(flavour, _record_and_recall(trio, (other, late), flavour, namespace))
    nothing_is_left(trio, namespace)


async def _record_and_recall(
    trio: LinkedZooKeeperTrio, nodes: tuple[Any, Any], flavour: Flavour, namespace: str
) -> None:
    urls = [trio.url_of(node) for node in nodes]
    async with (
        client(urls[0], flavour, namespace) as ours,
        client(urls[1], flavour, namespace) as theirs,
    ):
        async with theirs.lock("first", timeout=SOON):
            pass
        trio.delay(nodes[1], 0.1)
        async with ours.lock("job", timeout=SOON) as lease:
            grant = lease._hold.grant
            for value in map(str, range(5)):
                assert await ours._engine.backend.record(grant, value, 60.0)
                record = await theirs._engine.backend.recall("job")
                assert record is not None
                assert record.value == value

"""A server closes every connection and subscription: requests are sent again, no hold is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from harnesses.redlock import mark_as_new
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.ensemble import Ensemble
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster
from servers.redis_sentinel import SentinelTrio
from servers.registry import Servers
from stores.redis.helpers import blocking_and_asyncio, channels, over, until

pytestmark = pytest.mark.faults


class Store(NamedTuple):
    """A URL, and the servers that clients connect to."""

    url: str
    nodes: Sequence[RedisServer]

    def kill_connections(self) -> None:
        for node in self.nodes:
            for kind in ("normal", "pubsub"):
                node.ask("CLIENT", "KILL", "TYPE", kind)

    def has_subscriber(self, bench: Bench) -> bool:
        return any(channels(node, bench.namespace) for node in self.nodes)


class Majority(Ensemble[RedisServer]):
    """Three independent masters."""

    def __init__(self) -> None:
        super().__init__([RedisServer() for _ in range(3)])


def _alone(servers: Servers) -> Store:
    server = servers.of(RedisServer)
    return Store(server.url, [server])


def _sentinel(servers: Servers) -> Store:
    # The connections of the sentinels are killed too, and they take time to reconnect: with a long
    # down time, they do not elect another master for that reason.
    trio = servers.of(SentinelTrio, down_ms=60_000)
    return Store(trio.url, [trio.current_master()])


def _cluster(servers: Servers) -> Store:
    cluster = servers.of(RedisCluster)
    return Store(cluster.url, cluster.nodes)


def _redlock(servers: Servers) -> Store:
    nodes = servers.of(Majority)
    store = Store(f"redlock://{nodes.hosts}", nodes.nodes)
    mark_as_new(store.url)
    return store


STORES: dict[str, Callable[[Servers], Store]] = {
    "alone": _alone,
    "sentinel": _sentinel,
    "cluster": _cluster,
    "redlock": _redlock,
}


@pytest.mark.parametrize("kind", STORES)
@blocking_and_asyncio
def test_closed_connections_cost_no_hold(servers: Servers, kind: str, flavour: Flavour) -> None:
    """One client holds and another waits: the hold survives, and so does the wait, which only a
    wake-up can end."""
    store = STORES[kind](servers)

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        waiting = asyncio.create_task(theirs.get(bench.claim(), 30.0))
        await until(lambda: store.has_subscriber(bench))
        store.kill_connections()
        renewed = await ours.renew([grant])
        assert (renewed.lost, renewed.unknown) == ({}, {})
        await until(lambda: store.has_subscriber(bench))
        store.kill_connections()
        assert await ours.release(grant) is True
        assert (await waiting).token > grant.token

    over(store.url, flavour, body)

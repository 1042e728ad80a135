"""A node, a sentinel or a master that hangs or has changed its role: requests that do not need it
are not delayed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.stores.redis.connection import Connector
from holdfast.stores.redis.routes import (
    SLOTS,
    ClusterRoute,
    key_slot,
)
from holdfast.stores.redis.url import Access, NodeAddress
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.proxy import Proxy
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster
from servers.redis_sentinel import SentinelTrio
from stores.client_runner import run_with_clients
from stores.redis.helpers import (
    blocking_and_asyncio,
    over,
    replicated,
    until,
)

LONG_MS = 600_000
"""The node timeout of a cluster that does not detect by itself that a node hangs."""


BODY = "the body of the test"
"""The name of its task. Other tasks and threads of the client undo abandoned requests in the
background, and ask for the topology too."""


def _is_test_body() -> bool:
    if threading.current_thread() is threading.main_thread():
        task = asyncio.current_task()
        return task is not None and task.get_name() == BODY
    return not threading.current_thread().name.startswith("holdfast-")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[NodeAddress, bool]]:
    """The nodes that were asked for the topology, and whether the body of the test asked."""
    seen: list[tuple[NodeAddress, bool]] = []
    once: Any = Connector.once

    async def noted(
        connector: Any, access: Access, address: NodeAddress, *words: Any, **by: Any
    ) -> Any:
        seen.append((address, _is_test_body()))
        return await once(connector, access, address, *words, **by)

    monkeypatch.setattr(Connector, "once", noted)
    return seen


def _name_on(cluster: RedisCluster, index: int) -> str:
    """A lock name whose slot the node owns."""
    count = len(cluster.masters)
    slots = range(index * SLOTS // count, (index + 1) * SLOTS // count)
    return next(name for name in map(str, range(SLOTS)) if key_slot(name) in slots)


@pytest.mark.faults
@blocking_and_asyncio
def test_a_node_that_hangs_costs_its_own_names_only(
    flavour: Flavour, asked: list[tuple[NodeAddress, bool]]
) -> None:
    """It is also the first node that a client would ask for the slots."""

    async def body(client: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(BODY)
        silent, near, far = (_name_on(cluster, index) for index in range(3))
        its = await client.lock(silent).acquire()
        other = await client.lock(near).acquire()
        node = cluster.masters[0]
        node.pause()
        await until(lambda: bool(its.lost))
        assert other.held
        with pytest.raises(HoldfastError):
            await client.lock(silent, timeout=1).acquire()
        asked.clear()
        third = await client.lock(far, timeout=30).acquire()
        # The known owners of the other slots are still used.
        assert not [address for address, by_body in asked if by_body]
        asked.clear()
        with pytest.raises(HoldfastError):
            await client.lock(silent, timeout=1).acquire()
        await until(lambda: bool(asked))  # the acquire asks, or what undoes it
        assert asked[0][0] != NodeAddress(node.host, node.port)
        node.resume()
        for lease in (its, other, third):
            await lease.release()

    with RedisCluster(timeout_ms=LONG_MS) as cluster:
        run_with_clients(flavour, body, cluster.url, ttl=6)


@pytest.mark.faults
@blocking_and_asyncio
def test_replicas_are_waited_for_where_the_slot_is_now(flavour: Flavour) -> None:
    """The master of the slot is gone, and a replica has taken over."""

    async def body(client: Any) -> None:
        before = await client.lock("name", timeout=30).acquire()
        old, new, _ = cluster.nodes
        await replicated(old)
        old.kill()
        new.ask("CLUSTER", "FAILOVER", "TAKEOVER")
        async with client.lock("other", timeout=30) as lease:
            assert lease.held
        await before.release()

    with RedisCluster(masters=1, replicas=2, timeout_ms=LONG_MS) as cluster:
        for replica in cluster.replicas:
            replica.wait_linked()
        run_with_clients(flavour, body, f"{cluster.url}?replicas=1")


@pytest.fixture
def sentinels() -> Iterator[tuple[str, list[Proxy]]]:
    """The URL of a deployment, with proxies in front of its sentinels."""
    with SentinelTrio(replicas=0) as trio, ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(sentinel)) for sentinel in trio.sentinels]
        hosts = ",".join(f"{proxy.server.host}:{proxy.port}" for proxy in proxies)
        yield f"redis+sentinel://{hosts}/{trio.service}", proxies


@blocking_and_asyncio
def test_a_sentinel_that_hangs_leaves_time_for_the_others(
    sentinels: tuple[str, list[Proxy]], flavour: Flavour
) -> None:
    """Afterwards it is not asked first."""
    url, proxies = sentinels

    async def body(client: Any) -> None:
        silent, *others = proxies
        silent.stall()
        for proxy in others:
            proxy.delay(0.02)
        async with client.lock("name", timeout=4):
            pass
        before = silent.counts.connections
        client._engine.backend._route.refused()
        async with client.lock("name", timeout=4):
            pass
        assert silent.counts.connections == before

    run_with_clients(flavour, body, url)


@blocking_and_asyncio
def test_an_address_may_lead_to_another_master(flavour: Flavour) -> None:
    """Connections to the demoted server still work; batches, and requests with ``replicas``, drop
    them."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(proxied=True), bench.peer(proxied=True)
        grant = await ours.get(bench.claim())
        await ours.renew([grant])
        await theirs.get(bench.claim("other"))
        await replicated(first)
        second.ask("REPLICAOF", "NO", "ONE")
        first.ask("REPLICAOF", second.host, str(second.port))
        first.wait_linked()
        proxy._set(target=(second.host, second.port))
        assert list((await ours.renew([grant])).unknown) == [grant.claim.owner]
        assert not (await ours.renew([grant])).unknown
        with pytest.raises(BackendUnavailable, match="replica"):
            await theirs.attempt(bench.claim("third"))
        await theirs.get(bench.claim("third"))

    with RedisServer() as first, RedisServer(replica_of=first) as second, Proxy(first) as proxy:
        second.wait_linked()
        over(f"{first.url}?replicas=1", flavour, body, f"{proxy.url}?replicas=1")


def test_two_threads_may_retire_a_node() -> None:
    """Both threads have discovered that the node owns no slots."""
    here, there = NodeAddress("here", 1), NodeAddress("there", 1)

    class Pool:
        def close(self) -> None:
            route._pools.clear()  # another thread is faster

    class Nodes:
        access = Access(tls=False, options={}, request_seconds=5.0)

        def pool(self, *_: object) -> Pool:
            return Pool()

        async def once(self, *_: object, **__: object) -> list[Any]:
            return [[[0, SLOTS - 1, [b"new", 1]]]]

    route = ClusterRoute(Nodes(), [here], None)  # type: ignore[arg-type]
    for address in (here, there):
        route._pool(address)
    assert run_now(route._discover())[0] == NodeAddress("new", 1)

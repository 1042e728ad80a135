"""Redis other than one plain server: TLS, sockets, users, user clients, Sentinel, Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import Settings, Waiting
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from holdfast.url import open_store
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster
from servers.redis_sentinel import SentinelTrio
from servers.registry import Servers
from stores.redis.helpers import Slot, blocking_and_asyncio, client_peer, over, replicated

T = TypeVar("T")


async def _everything(bench: Bench) -> None:
    """Runs every script once, and wakes a waiter of another peer."""
    ours, theirs = bench.peer(), bench.peer()
    await _hand_over(bench, ours, theirs)
    reader = await ours.take(bench.claim("rw", Mode.SHARED))
    assert (await theirs.look("rw")).holders[0].mode is Mode.SHARED
    assert await theirs.revoke("rw") == [reader.token]
    slots = await ours.take(bench.claim("slots", Mode.SLOTS, weight=2, limit=3))
    assert slots.slots == (0, 1)
    assert (await ours.exchange(slots, slots.claim._replace(owner="next")))[0] is True
    assert await ours.record(await ours.take(bench.claim("record")), "value") is True
    record = await theirs.recall("record")
    assert record is not None
    assert record.value == "value"
    assert {each.name for each in await theirs.survey()} == {"slots", "record"}
    assert not [each for each in await theirs.probe() if each.level == "broken"]


async def _hand_over(bench: Bench, ours: Peer, theirs: Peer) -> None:
    grant = await ours.take(bench.claim())
    waiting = bench.claim()
    getting = asyncio.create_task(theirs.get(waiting))
    await bench.in_line(ours, "name", 1)
    renewed = await ours.renew([grant])
    assert (renewed.lost, renewed.unknown) == ({}, {})
    assert (await theirs.renew([], [Waiting(waiting, 2)])).forgotten == frozenset()
    assert await ours.release(grant)
    granted = await getting
    assert granted.token > grant.token
    await theirs.abandon(granted.claim)


@blocking_and_asyncio
def test_a_unix_socket(servers: Servers, flavour: Flavour) -> None:
    over(servers.of(RedisServer).unix_url, flavour, _everything)


@blocking_and_asyncio
def test_tls_with_a_password(servers: Servers, flavour: Flavour) -> None:
    over(servers.of(RedisServer, tls=True, password="p@ss/w:rd").url, flavour, _everything)


@blocking_and_asyncio
def test_tls_refuses_a_certificate_that_it_cannot_verify(
    servers: Servers, flavour: Flavour
) -> None:
    server = servers.of(RedisServer, tls=True, password="p@ss/w:rd")

    async def body(bench: Bench) -> None:
        with pytest.raises(BackendUnavailable, match="certificate verify failed"):
            await bench.peer().attempt(bench.claim())

    over(server.url.partition("?")[0], flavour, body)


@blocking_and_asyncio
def test_a_wrong_password_is_not_in_the_error(servers: Servers, flavour: Flavour) -> None:
    server = servers.of(RedisServer, password="right")

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        with pytest.raises(BackendUnavailable, match=str(server.port)) as caught:
            await peer.attempt(bench.claim())
        assert "wr0ng" not in str(caught.value)
        assert "wr0ng" not in repr(peer.store.display)

    over(f"redis://:wr0ng@{server.host}:{server.port}/0", flavour, body)


# As docs/stores/redis.md lists it.
ALLOWED = (
    "~locks:* &locks:* +eval +evalsha +time +info +hget +hmget +hset +hdel +hexists +pexpire "
    "+publish +pubsub|numsub +subscribe +scan"
)


@blocking_and_asyncio
def test_a_user_with_only_the_rights_of_the_documentation(flavour: Flavour) -> None:
    with RedisServer(users=[f"worker on >secret resetchannels {ALLOWED}"]) as server:

        async def body(bench: Bench) -> None:
            bench.namespace = "locks"
            await _everything(bench)

        over(f"redis://worker:secret@{server.host}:{server.port}/0", flavour, body)


@blocking_and_asyncio
def test_a_user_with_few_rights_on_a_cluster(servers: Servers, flavour: Flavour) -> None:
    cluster = servers.of(RedisCluster)
    for node in cluster.nodes:
        rights = f"on >secret resetchannels {ALLOWED} +cluster|slots +asking"
        node.ask("ACL", "SETUSER", "worker", *rights.split())

    async def body(bench: Bench) -> None:
        bench.namespace = "locks"
        await _everything(bench)
        for node in cluster.nodes:
            node.ask("FLUSHALL")

    over(cluster.url.replace("://", "://worker:secret@"), flavour, body)


def test_another_database(servers: Servers) -> None:
    server = servers.of(RedisServer)

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        assert isinstance(await ours.attempt(bench.claim()), Grant)
        assert (await theirs.look("name")).holders
        assert not server.ask("KEYS", f"{bench.namespace}:*")

    over(f"redis://{server.host}:{server.port}/3", Flavour.ASYNCIO, body)


@blocking_and_asyncio
def test_the_settings_of_a_users_own_client(servers: Servers, flavour: Flavour) -> None:
    plain = servers.of(RedisServer)
    safe = servers.of(RedisServer, tls=True, password="p@ss/w:rd")

    async def body(bench: Bench) -> None:
        for make in (redis.Redis.from_url, redis.asyncio.Redis.from_url):
            for url in (plain.url, plain.unix_url, safe.url):
                client = make(url)
                peer = client_peer(bench, client)
                assert "p@ss" not in peer.store.display
                claim = bench.claim()
                assert await peer.release(await peer.take(claim))

    over(plain.url, flavour, body)


def test_the_settings_of_sentinel_and_cluster_clients(servers: Servers) -> None:
    trio, cluster = servers.of(SentinelTrio), servers.of(RedisCluster)
    sentinels = [(each.host, each.port) for each in trio.sentinels]

    async def body(bench: Bench) -> None:
        kinds: list[Any] = [redis.sentinel.Sentinel, redis.asyncio.sentinel.Sentinel]
        blocking, aio = (kind(sentinels).master_for(trio.service) for kind in kinds)
        node = cluster.nodes[0]
        clients = [blocking, aio, redis.RedisCluster(node.host, node.port)]
        clients.append(redis.asyncio.RedisCluster(node.host, node.port))
        for client in clients:
            peer = client_peer(bench, client)
            assert await peer.release(await peer.take(bench.claim()))

    over(trio.url, Flavour.ASYNCIO, body)


@pytest.mark.faults
@blocking_and_asyncio
def test_sentinel(servers: Servers, flavour: Flavour) -> None:
    over(servers.of(SentinelTrio).url, flavour, _everything)


async def _persistently(work: Callable[[], Awaitable[T]]) -> T:
    """Retries during a failover, as the core does."""
    deadline = now() + 30.0
    while True:
        try:
            return await work()
        except BackendUnavailable:
            assert now() < deadline, "the failover did not end"
            await asyncio.sleep(0.1)


async def _get_with_re_checks(peer: Peer, claim: Claim) -> Grant:
    """Waits as the core does: a broken subscription costs a delay, never a hang."""
    while True:
        answer = await _persistently(lambda: peer.attempt(claim))
        if isinstance(answer, Grant):
            return answer
        await peer.wait(claim, answer, now() + 3.0)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["kill", "pause"])
@blocking_and_asyncio
def test_a_failover_during_a_hold_and_a_wait(flavour: Flavour, fault: str) -> None:
    """The replica has the hold and the queue; the subscription follows the master."""
    with SentinelTrio() as trio:

        async def body(bench: Bench) -> None:
            ours, theirs = bench.peer(request=1.0), bench.peer(request=1.0)
            grant = await ours.take(bench.claim())
            claim = bench.claim()

            getting = asyncio.create_task(_get_with_re_checks(theirs, claim))
            await bench.in_line(ours, "name", 1)
            old = trio.current_master()
            await replicated(old)
            getattr(old, fault)()
            renewed = await _persistently(lambda: ours.renew([grant]))
            assert renewed == ({}, {}, frozenset(), None)
            assert trio.current_master() is not old
            # The waiter returns early, finds the new master and subscribes there in time.
            await _persistently(lambda: bench.in_line(ours, "name", 1))
            assert await _persistently(lambda: ours.release(grant)) is True
            assert (await getting).token > grant.token

        over(trio.url, flavour, body)


@blocking_and_asyncio
def test_cluster(servers: Servers, flavour: Flavour) -> None:
    over(servers.of(RedisCluster).url, flavour, _everything)


@blocking_and_asyncio
def test_a_slot_is_moved_during_a_hold_and_a_wait(servers: Servers, flavour: Flavour) -> None:
    cluster = servers.of(RedisCluster)

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        getting = asyncio.create_task(theirs.get(bench.claim(), 30.0))
        await bench.in_line(ours, "name", 1)
        slot = Slot(cluster, f"{bench.namespace}:{{name}}")
        slot.begin()
        assert (await ours.renew([grant])).lost == {}
        slot.move()  # the old owner replies ASK, and the new owner requires ASKING
        assert (await ours.renew([grant])) == ({}, {}, frozenset(), None)
        assert isinstance(await ours.attempt(bench.claim(), join=False), Busy)
        slot.end()
        assert await ours.release(grant) is True
        assert (await getting).token > grant.token
        assert (await theirs.look("name")).holders

    over(cluster.url, flavour, body)


@pytest.mark.faults
@blocking_and_asyncio
def test_a_node_of_a_cluster_is_gone_for_good(flavour: Flavour) -> None:
    """Its replica takes over its slots; clients that knew the old owner find the new one."""
    with RedisCluster(replicas=1, timeout_ms=1000) as cluster:

        async def body(bench: Bench) -> None:
            peer = bench.peer(request=2.0)
            grant = await peer.take(bench.claim())
            slot = Slot(cluster, f"{bench.namespace}:{{name}}")
            await replicated(slot.source)
            slot.source.kill()
            assert await _persistently(lambda: _sure_renewal(peer, grant)) is True
            assert await peer.release(grant) is True

        over(cluster.url, flavour, body)


async def _sure_renewal(peer: Peer, grant: Grant) -> bool:
    renewed = await peer.renew([grant])
    if renewed.unknown:
        raise BackendUnavailable("not yet")
    return not renewed.lost


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://a,b/0", "one server"),
        ("redis://a/x", "database number"),
        ("redis+sentinel://a,b,c", "name of the master"),
        ("redis+cluster://a/1", "database 0"),
        ("redis+cluster://a?loss_protection=on", "cluster"),
        ("redis://a?max_ttl=5", "needs loss_protection"),
        ("redis://a?interop=java", "only redis-py"),
        ("redis://a?colour=red", "no option 'colour'"),
        ("unix://?db=0", "path of a socket"),
    ],
)
def test_invalid_options_are_refused_without_a_server(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(url, Settings())

"""Details of Redis below the contract: scripts, connections, keys, late requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.claim import Busy, Grant, Mode
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.io.clock import now
from holdfast.io.connection import PENDING
from holdfast.io.resp import pack
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.redis.backend import RedisBackend
from holdfast.stores.redis.routes import key_slot
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from holdfast.url import open_store
from servers.proxy import Proxy
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster
from servers.registry import Servers
from stores.redis.helpers import (
    blocking_and_asyncio,
    channels,
    connections,
    keys,
    listening,
    over,
    scripts_run,
    until,
)


@pytest.fixture
def server(servers: Servers) -> RedisServer:
    return servers.of(RedisServer)


@blocking_and_asyncio
def test_an_uncontended_hold_is_two_requests(server: RedisServer, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        await peer.release(await peer.take(bench.claim()))
        before = scripts_run(server)
        for _ in range(10):
            assert await peer.release(await peer.take(bench.claim()))
        assert scripts_run(server) - before == 20

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_flushed_scripts_are_sent_again(server: RedisServer, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        server.ask("SCRIPT", "FLUSH")
        waiting = bench.claim()
        await theirs.queue(waiting)
        server.ask("SCRIPT", "FLUSH")
        assert (await ours.renew([grant])).lost == {}
        server.ask("SCRIPT", "FLUSH")
        assert await ours.release(grant)
        assert (await theirs.get(waiting)).token > grant.token

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_lost_reply_gives_the_same_grant(server: RedisServer, flavour: Flavour) -> None:
    proxy = Proxy(server)
    try:

        async def body(bench: Bench) -> None:
            peer, others = bench.peer(proxied=True), bench.peer()
            await peer.release(await peer.take(bench.claim("warm")))
            claim = bench.claim()
            proxy.drop_next_reply()
            grant = await peer.take(claim)
            assert (await others.look("name")).holders[0].token == grant.token
            proxy.drop_next_reply()
            assert await peer.release(grant) is True
            assert not (await others.look("name")).holders

        over(server.url, flavour, body, proxy.url)
    finally:
        proxy.close()


@blocking_and_asyncio
def test_an_attempt_that_arrives_after_its_abandon_takes_nothing(
    server: RedisServer, flavour: Flavour
) -> None:
    """A request can arrive after the abandon that undoes it, over another connection."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        claim = bench.claim()
        assert isinstance(peer.backend, RedisBackend)
        backend: Any = peer.backend
        start, key = backend._keys.start(backend._scripts.acquire, claim.name)
        late = f"{start}{backend._pack_claim(claim, True, 0)}".encode()
        await peer.abandon(claim)
        reply = await peer.run(_call(backend, late, key))
        assert reply == [b"gone"]
        assert not (await peer.look("name")).holders
        # An attempt that is sent after the abandon is granted.
        assert isinstance(await peer.attempt(claim), Grant)

    over(server.url, flavour, body)


async def _call(backend: Any, packed: bytes, key: str) -> Any:
    return await backend._call(packed, key)


def test_a_cancelled_request_leaves_its_connection_usable(server: RedisServer) -> None:
    proxy = Proxy(server)
    try:

        async def body(bench: Bench) -> None:
            peer, others = bench.peer(proxied=True), bench.peer()
            await peer.release(await peer.take(bench.claim("warm")))
            for number in range(20):
                claim = bench.claim(f"name-{number}")
                proxy.hold_replies()
                asked = asyncio.create_task(peer.attempt(claim))
                await asyncio.sleep(0)  # the request is sent
                asked.cancel()
                undone = asyncio.create_task(peer.abandon(claim))
                await asyncio.wait([asked])
                proxy.let_replies()
                await undone
                assert asked.cancelled()
                assert not (await others.look(claim.name)).holders
            assert proxy.open_connections == 1

        over(server.url, Flavour.ASYNCIO, body, proxy.url)
    finally:
        proxy.close()


@blocking_and_asyncio
def test_a_silent_server_is_an_error_in_time(server: RedisServer, flavour: Flavour) -> None:
    proxy = Proxy(server)
    try:

        async def body(bench: Bench) -> None:
            peer = bench.peer(proxied=True, request=1.0)
            grant = await peer.take(bench.claim())
            assert (await peer.renew([grant])).lost == {}
            proxy.stall()
            with pytest.raises(BackendUnavailable, match="did not answer"):
                await peer.attempt(bench.claim("other"))
            patient = bench.peer(proxied=True, request=30.0)
            backend = (patient if flavour is Flavour.BLOCKING else patient.renewer).backend
            with pytest.raises(BackendUnavailable):
                await bench.workers.run(lambda: run_now(_hurried(backend, grant)))
            proxy.resume()
            assert (await peer.renew([grant])).lost == {}

        over(server.url, flavour, body, proxy.url)
    finally:
        proxy.close()


async def _hurried(backend: Any, grant: Grant) -> None:
    started = now()
    try:
        await backend.renew([grant], [], until=started + 0.2)
    finally:
        assert now() - started < 25, "it went on for longer than it was allowed to"


@blocking_and_asyncio
def test_every_key_expires(server: RedisServer, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        await theirs.queue(bench.claim())
        await ours.abandon(bench.claim())
        await ours.take(bench.claim("slots", Mode.SLOTS, weight=2, limit=3))
        await theirs.queue(bench.claim("slots", Mode.SLOTS, weight=2, limit=3))
        await ours.take(bench.claim("shared", Mode.SHARED))
        await ours.record(grant, "value")
        found = keys(server, bench.namespace)
        assert len(found) == 3
        for key in found:
            assert 0 < int(str(server.ask("PTTL", key))) <= 8 * 86_400_000, key

    over(server.url, flavour, body)


NAMES = ["plain", "{", "}", "{}", "a{b}c", "%7B", "é{ü}", "a b", "*?[x]\\", "x" * 512, "}{"]


def test_any_text_is_a_name_on_a_cluster(servers: Servers) -> None:
    """Also text that looks like a hash tag, a pattern or an escape."""
    cluster = servers.of(RedisCluster)

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        for name in NAMES:
            grant = await ours.take(bench.claim(name))
            await theirs.queue(bench.claim(name))
            assert await ours.release(grant)
        assert sorted(each.name for each in await ours.survey()) == sorted(NAMES)

    over(cluster.url, Flavour.BLOCKING, body)


def test_slots_are_computed_as_the_server_does(servers: Servers) -> None:
    node = servers.of(RedisCluster).nodes[0]
    for key in [*NAMES, "ns:{a}:more", "{}x", "x{}y{z}"]:
        assert key_slot(key) == int(str(node.ask("CLUSTER", "KEYSLOT", key)))


@blocking_and_asyncio
def test_owners_are_never_published(server: RedisServer, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        listener: Any = open_store(server.url, Settings()).backend(BlockingRuntime())
        wakeups: Any = await listener._connector.subscription(listener.options.nodes[0], "nothing")
        wakeups.send(pack("PSUBSCRIBE", "*"))
        grant = await ours.take(bench.claim())
        claim = bench.claim()
        getting = asyncio.create_task(theirs.get(claim))
        await until(lambda: listening(server, bench.namespace) == 1)
        await ours.release(grant)
        await getting
        wakeups.connection.collect()
        published = []
        while (message := wakeups.connection.next()) is not PENDING:
            published += [message] * (message[0] == b"pmessage")
        wakeups.close()
        await listener.close()
        assert len(published) == 1
        assert not any(claim.owner.encode() in part for part in published[0])

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_dead_waiter_is_skipped_at_once(server: RedisServer, flavour: Flavour) -> None:
    """Its channel has no subscriber, so the lock is reserved for the next waiter at once."""

    async def body(bench: Bench) -> None:
        ours, dying, theirs = bench.peer(), bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        first = bench.claim()
        busy = await dying.queue(first)
        await dying.wait(first, busy, now())  # subscribes
        await dying.queue(first)
        second = asyncio.create_task(theirs.get(bench.claim()))
        await until(lambda: listening(server, bench.namespace) == 2)
        await dying.close()
        await until(lambda: len(channels(server, bench.namespace)) == 1)
        await ours.release(grant)
        granted = await second
        assert granted.token - grant.token < 1_000_000, "the lock was reserved for the dead waiter"
        assert not (await ours.look("name")).waiters

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_connections_stay_few(server: RedisServer, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        before = connections(server)
        peer = bench.peer()
        grant = await peer.take(bench.claim())
        getting = [asyncio.create_task(peer.get(bench.claim(), 30.0)) for _ in range(30)]
        await bench.in_line(peer, "name", 30)
        most = connections(server) - before
        await peer.release(grant)
        for done in asyncio.as_completed(getting):
            await peer.release(await done)
        # Four for requests and one for wake-ups; asyncio shares one for all requests.
        assert most <= (5 if flavour is Flavour.BLOCKING else 2)

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_another_protocol_is_refused(server: RedisServer, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        grant = await peer.take(bench.claim())
        server.ask("HSET", f"{bench.namespace}:{{name}}", "v", "99")
        for work in (
            peer.attempt(bench.claim()),
            peer.release(grant),
            peer.look("name"),
            peer.abandon(grant.claim),
            peer.revoke("name"),
        ):
            with pytest.raises(Incompatible, match="version 99"):
                await work
        assert "version 99" in (await peer.renew([grant])).unknown[grant.claim.owner]

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_counter_survives_a_clock_that_went_back(server: RedisServer, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        grant = await peer.take(bench.claim())
        await peer.release(grant)
        ahead = grant.token + 3_600_000_000
        server.ask("HSET", f"{bench.namespace}:{{name}}", "t", str(ahead))
        assert (await peer.take(bench.claim())).token == ahead + 1

    over(server.url, flavour, body)


def test_a_full_queue_is_reported(server: RedisServer) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        await peer.take(bench.claim())
        queue_fields = ("w", "10000", "i", "1", "q", "10000")
        server.ask("HSET", f"{bench.namespace}:{{name}}", *queue_fields)
        busy = await peer.attempt(bench.claim())
        assert isinstance(busy, Busy)
        assert "already queued" in busy.reason

    over(server.url, Flavour.BLOCKING, body)


@blocking_and_asyncio
def test_a_full_server_still_releases(flavour: Flavour) -> None:
    with RedisServer() as server:

        async def body(bench: Bench) -> None:
            ours, theirs = bench.peer(), bench.peer()
            grant = await ours.take(bench.claim())
            claim = bench.claim()
            await theirs.queue(claim)
            await theirs.queue(claim)
            server.ask("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(BackendUnavailable, match="OOM"):
                await theirs.attempt(bench.claim("other"))
            assert await ours.release(grant) is True
            server.ask("CONFIG", "SET", "maxmemory", "0")
            assert isinstance(await theirs.attempt(claim), Grant)

        over(server.url, flavour, body)

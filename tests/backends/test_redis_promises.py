"""What a Redis store promises on request: loss protection, replicas, no eviction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from backends.redis_bench import blocking_and_asyncio, over
from holdfast.backends.redis import RedisBackend, initialise
from holdfast.claim import Busy, Grant
from holdfast.core.contract import Settings
from holdfast.errors import GuaranteeNotMet
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from holdfast.url import open_store
from servers.process import wait_until
from servers.redis import RedisServer
from servers.registry import Servers

PROTECTED = "?loss_protection=on&max_ttl=3"


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def _begin(peer: Peer) -> None:
    assert isinstance(peer.backend, RedisBackend)
    assert "marked as new" in await peer.run(initialise(peer.backend))


async def _refused_until_max_ttl(bench: Bench, peer: Peer, lost_at: float) -> Grant:
    """Nothing is granted for max_ttl, the reason is told, and then it is."""
    claim = bench.claim("other", ttl=3.0)
    busy = await peer.attempt(claim, join=False)
    assert isinstance(busy, Busy)
    assert "restarted, emptied or replaced" in busy.reason
    assert busy.retry_seconds is not None
    assert 0 < busy.retry_seconds <= 3.1
    while isinstance(answer := await peer.attempt(claim, join=False), Busy):
        assert now() - lost_at < 10.0
        await asyncio.sleep(0.05)
    assert now() - lost_at >= 3.0, "granted while a lost hold could still be believed in"
    return answer


@blocking_and_asyncio
def test_a_new_deployment_waits_unless_it_is_marked(
    own_server: RedisServer, flavour: Flavour
) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        busy = await peer.attempt(bench.claim(ttl=3.0), join=False)
        assert isinstance(busy, Busy)
        assert "holdfast init" in busy.reason
        await _begin(peer)
        assert isinstance(await peer.attempt(bench.claim(ttl=3.0)), Grant)

    over(own_server.url + PROTECTED, flavour, body)


@pytest.mark.parametrize("loss", ["restart", "flush"])
@blocking_and_asyncio
def test_nothing_is_granted_after_a_loss(
    own_server: RedisServer, flavour: Flavour, loss: str
) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        await _begin(peer)
        grant = await peer.take(bench.claim(ttl=3.0))
        if loss == "flush":
            own_server.ask("FLUSHALL")
        else:
            own_server.kill()
            own_server.start()
        lost_at = now()
        assert (await peer.renew([grant])).lost
        after = await _refused_until_max_ttl(bench, peer, lost_at)
        assert after.token > grant.token

    over(own_server.url + PROTECTED, flavour, body)


@blocking_and_asyncio
def test_holds_that_a_restart_kept_go_on(flavour: Flavour) -> None:
    with RedisServer(persist=True) as server:

        async def body(bench: Bench) -> None:
            peer = bench.peer()
            await _begin(peer)
            grant = await peer.take(bench.claim(ttl=3.0))
            server.kill()
            server.start()
            assert (await peer.renew([grant])).lost == {}
            assert isinstance(await peer.attempt(grant.claim), Grant), "the same grant again"
            assert await peer.release(grant)

        over(server.url + PROTECTED, flavour, body)


@pytest.mark.faults
@pytest.mark.parametrize("protected", [True, False])
@blocking_and_asyncio
def test_a_replica_is_promoted_without_the_lock(flavour: Flavour, protected: bool) -> None:
    """With loss protection nobody is let in beside the holder; without, the overlap shows, and
    the later token is the higher one, so that a fence refuses the stale holder."""
    suffix = PROTECTED if protected else ""
    with RedisServer() as master, RedisServer(replica_of=master) as replica:
        replica.wait_linked()

        async def body(bench: Bench) -> None:
            old = bench.peer()
            if protected:
                await _begin(old)
                wait_until("replica", lambda: "run" in str(_marks(replica, bench)))
            replica.ask("REPLICAOF", "127.0.0.1", "1")  # it no longer hears of anything
            grant = await old.take(bench.claim(ttl=3.0))
            master.kill()
            replica.ask("REPLICAOF", "NO", "ONE")
            lost_at = now()
            bench.harness.url = replica.url + suffix
            new = bench.peer()
            if protected:
                later = await _refused_until_max_ttl(bench, new, lost_at)
            else:
                later = await new.take(bench.claim(ttl=3.0))
            assert later.token > grant.token

        over(master.url + suffix, flavour, body)


def _marks(server: RedisServer, bench: Bench) -> object:
    return server.ask("HGETALL", f"{bench.namespace}:loss")


def test_loss_protection_bounds_the_ttl() -> None:
    store = open_store("redis://localhost" + PROTECTED, Settings())
    assert store.longest_ttl == 3.0


@blocking_and_asyncio
def test_a_grant_that_too_few_replicas_have_is_undone(flavour: Flavour) -> None:
    with RedisServer() as master, RedisServer(replica_of=master) as replica:
        replica.wait_linked()

        async def body(bench: Bench) -> None:
            peer = bench.peer()
            grant = await peer.get(bench.claim())  # a busy replica may not say so in time
            assert replica.ask("EXISTS", f"{bench.namespace}:{{name}}") == 1
            was, handed = await peer.exchange(grant, bench.claim())
            assert was
            assert isinstance(handed, Grant)
            assert await peer.release(handed)
            replica.pause()
            busy = await peer.attempt(bench.claim())
            assert isinstance(busy, Busy)
            assert "0 of 1 replicas" in busy.reason
            assert not (await peer.look("name")).holders
            replica.resume()
            await peer.get(bench.claim("later"))

        over(f"{master.url}?replicas=1", flavour, body)


@blocking_and_asyncio
def test_waiting_for_replicas_blocks_nobody_else(flavour: Flavour) -> None:
    with RedisServer() as master, RedisServer(replica_of=master) as replica:
        replica.wait_linked()

        async def body(bench: Bench) -> None:
            peer = bench.peer()
            grant = await peer.take(bench.claim())
            replica.pause()
            stuck = asyncio.create_task(peer.attempt(bench.claim("stuck")))
            done, _ = await asyncio.wait([stuck], timeout=0.1)
            assert not done
            assert await peer.release(grant)
            assert not stuck.done()
            assert isinstance(await stuck, Busy)
            replica.resume()

        over(f"{master.url}?replicas=1", flavour, body)


EVICTING = ("--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru")


@blocking_and_asyncio
def test_a_server_that_may_evict_locks_is_refused(servers: Servers, flavour: Flavour) -> None:
    server = servers.of(RedisServer, arguments=EVICTING)

    async def refused(bench: Bench) -> None:
        peer = bench.peer()
        with pytest.raises(GuaranteeNotMet, match="volatile-lru"):
            await peer.attempt(bench.claim())

    async def allowed(bench: Bench) -> None:
        peer = bench.peer()
        assert isinstance(await peer.attempt(bench.claim()), Grant)
        assert "warning" in {each.level for each in await peer.probe() if "evict" in each.detail}

    over(server.url, flavour, refused)
    over(f"{server.url}?allow_eviction=on", flavour, allowed)

"""What a Redis store promises on request: loss protection, replicas, no eviction, redis-py."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator

import pytest
import redis
from redis.lock import Lock as RedisPyLock

from backends.redis_bench import blocking_and_asyncio, over
from holdfast.backends.redis import RedisBackend, initialise
from holdfast.claim import Busy, Grant, Mode
from holdfast.core.contract import Guarantee, Settings
from holdfast.core.drive import run_now
from holdfast.errors import GuaranteeNotMet, Unsupported
from holdfast.runtimes.blocking import BlockingRuntime
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from holdfast.url import open_store
from servers.process import wait_until
from servers.redis import RedisServer
from servers.redis_cluster import RedisCluster
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


INTEROP = "?interop=redis-py"


def _name() -> str:
    """Verbatim names ignore the namespace."""
    return f"old-{secrets.token_hex(6)}"


@blocking_and_asyncio
def test_redis_py_and_holdfast_exclude_each_other(servers: Servers, flavour: Flavour) -> None:
    server = servers.of(RedisServer)
    client = redis.Redis(server.host, server.port)

    async def body(bench: Bench) -> None:
        name = _name()
        old = RedisPyLock(client, name, timeout=30, blocking=False)
        peer = bench.peer()
        assert old.acquire()
        claim = bench.claim(name)
        assert (await peer.queue(claim)).retry_seconds == pytest.approx(0.1)
        old.release()
        grant = await peer.take(claim)
        assert client.get(name) == grant.claim.owner.encode()
        assert not old.acquire()
        assert (await peer.renew([grant])).lost == {}
        assert await peer.release(grant)
        assert old.acquire()
        old.release()
        with pytest.raises(Unsupported, match="exclusive locks only"):
            await peer.attempt(bench.claim(name, Mode.SHARED))

    over(server.url + INTEROP, flavour, body)
    client.close()


@blocking_and_asyncio
def test_a_hold_that_redis_py_took_over_is_lost(servers: Servers, flavour: Flavour) -> None:
    server = servers.of(RedisServer)

    async def body(bench: Bench) -> None:
        name = _name()
        peer = bench.peer()
        grant = await peer.take(bench.claim(name))
        server.ask("SET", name, "somebody", "PX", "30000")
        assert grant.claim.owner in (await peer.renew([grant])).lost
        await peer.release(grant)
        assert server.ask("GET", name) == "somebody"

    over(server.url + INTEROP, flavour, body)


@blocking_and_asyncio
def test_from_redis_py_to_native_without_a_gap(servers: Servers, flavour: Flavour) -> None:
    """Doors with and without interop see each other's holds, so a fleet can move door by door."""
    server = servers.of(RedisServer)

    async def body(bench: Bench) -> None:
        name = _name()
        moving = bench.peer()
        bench.harness.url = server.url
        native = bench.peer()
        first = await moving.take(bench.claim(name))
        assert isinstance(await native.attempt(bench.claim(name), join=False), Busy)
        assert await moving.release(first)
        second = await native.take(bench.claim(name))
        assert second.token > first.token
        assert isinstance(await moving.attempt(bench.claim(name), join=False), Busy)
        assert await native.release(second)
        assert isinstance(await moving.attempt(bench.claim(name)), Grant)

    over(server.url + INTEROP, flavour, body)


class Crowd:
    """Threads that increment a plain integer, each under a lock of its own kind."""

    def __init__(self, server: RedisServer, name: str) -> None:
        self.inside = self.total = 0
        self.overlaps = 0
        self._server, self._name = server, name

    def old(self, count: int) -> None:
        client = redis.Redis(self._server.host, self._server.port)
        for _ in range(count):
            with RedisPyLock(client, self._name, timeout=30, sleep=0.002):
                self._work()
        client.close()

    def new(self, count: int) -> None:
        store = open_store(self._server.url + INTEROP, Settings())
        backend = store.backend(BlockingRuntime())
        bench = Bench.__new__(Bench)
        for _ in range(count):
            claim = Bench.claim(bench, self._name)
            while isinstance(answer := run_now(backend.attempt(claim, join=True)), Busy):
                run_now(backend.wait(claim, answer, now() + 0.005))
            self._work()
            assert run_now(backend.release(answer))
        run_now(backend.close())

    def _work(self) -> None:
        self.inside += 1
        self.overlaps += self.inside != 1
        before = self.total
        threading.Event().wait(0.0005)  # somebody else would come in here
        self.total = before + 1
        self.inside -= 1


def test_no_overlap_between_redis_py_and_holdfast(servers: Servers) -> None:
    crowd = Crowd(servers.of(RedisServer), _name())
    kinds = [crowd.old, crowd.new] * 3
    threads = [threading.Thread(target=kind, args=(40,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (crowd.overlaps, crowd.total) == (0, 240)


def test_interop_says_what_it_cannot_promise() -> None:
    store = open_store("redis://localhost" + INTEROP, Settings())
    missing = {Guarantee.FIFO, Guarantee.SHARED, Guarantee.SLOTS}
    assert not store.guarantees & missing
    assert Guarantee.FENCED in store.guarantees


def test_interop_on_a_cluster_refuses_names_of_another_slot(servers: Servers) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        assert isinstance(await peer.attempt(bench.claim(_name())), Grant)
        with pytest.raises(Unsupported, match="redis-py"):
            await peer.attempt(bench.claim("{user}:1"))

    over(servers.of(RedisCluster).url + INTEROP, Flavour.BLOCKING, body)

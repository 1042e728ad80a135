"""Optional guarantees of a Redis store: grants on replicas, and no eviction."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.claim import Busy, Grant
from holdfast.errors import GuaranteeNotMet
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.redis import RedisServer
from servers.registry import Servers
from stores.redis.helpers import blocking_and_asyncio, over


@blocking_and_asyncio
def test_a_grant_that_too_few_replicas_have_is_undone(flavour: Flavour) -> None:
    with RedisServer() as master, RedisServer(replica_of=master) as replica:
        replica.wait_linked()

        async def body(bench: Bench) -> None:
            peer = bench.peer()
            grant = await peer.get(bench.claim())  # a busy replica may confirm too late
            assert replica.ask("EXISTS", f"{bench.namespace}:{{name}}") == 1
            was, granted = await peer.exchange(grant, bench.claim())
            assert was
            assert isinstance(granted, Grant)
            assert await peer.release(granted)
            replica.pause()
            busy = await peer.attempt(bench.claim())
            assert isinstance(busy, Busy)
            assert "0 of 1 replicas" in busy.reason
            assert not (await peer.look("name")).holders
            replica.resume()
            await peer.get(bench.claim("later"))

        over(f"{master.url}?replicas=1", flavour, body)


@blocking_and_asyncio
def test_waiting_for_replicas_blocks_no_other_request(flavour: Flavour) -> None:
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

"""``exchange`` inside a client, and repeated attempts: a hold is never granted twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from holdfast.claim import Busy, Grant
from holdfast.errors import BackendUnavailable
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.proxy import Proxy
from servers.redis import RedisServer
from servers.registry import Servers
from stores.client_runner import run_with_clients
from stores.redis.helpers import blocking_and_asyncio, over, until

SECONDS = 30.0


@pytest.fixture
def server(servers: Servers) -> RedisServer:
    return servers.of(RedisServer)


@pytest.fixture
def replica() -> Iterator[RedisServer]:
    """A replica with a master of its own."""
    with RedisServer() as master, RedisServer(replica_of=master) as replica:
        replica.wait_linked()
        yield replica


def _replicated(replica: RedisServer) -> str:
    assert replica.replica_of is not None
    return f"{replica.replica_of.url}?replicas=1"


@blocking_and_asyncio
def test_late_replicas_take_nothing_from_the_next_waiter(
    replica: RedisServer, flavour: Flavour
) -> None:
    """The release woke the next waiter, which attempted; then replicas lag in the exchange."""

    async def body(bench: Bench) -> None:
        peer, waiter = bench.peer(), bench.claim()
        grant = await peer.get(bench.claim())
        await peer.queue(waiter)
        assert await peer.release(grant)
        its = await peer.get(waiter)
        replica.pause()
        _, answer = await peer.exchange(grant, waiter)  # the release is done, the attempt is not
        assert isinstance(answer, Busy)
        assert [holder.token for holder in (await peer.look("name")).holders] == [its.token]
        replica.resume()
        assert await peer.release(its)

    over(_replicated(replica), flavour, body)


@blocking_and_asyncio
def test_late_replicas_leave_the_next_waiter_to_attempt(
    replica: RedisServer, flavour: Flavour
) -> None:
    """A waiter whose grant was undone is in no queue, and attempts again by itself."""

    async def body(bench: Bench) -> None:
        peer, waiter = bench.peer(), bench.claim("other")
        grant = await peer.get(bench.claim())
        replica.pause()
        await peer.queue(waiter)
        replica.resume()
        its = await peer.get(waiter)
        replica.pause()
        _, answer = await peer.exchange(grant, waiter)
        assert isinstance(answer, Busy)
        assert [holder.token for holder in (await peer.look("other")).holders] == [its.token]
        replica.resume()

    over(_replicated(replica), flavour, body)


@pytest.mark.usefixtures("no_recheck")
@blocking_and_asyncio
def test_a_client_with_replicas_wakes_the_next_waiter(
    replica: RedisServer, flavour: Flavour
) -> None:
    """The release wakes the next waiter: no polling is needed."""

    async def body(client: Any) -> None:
        tokens: list[int] = []

        async def one() -> None:
            async with client.lock("name", timeout=SECONDS) as lease:
                tokens.append(lease.token)
                await until(lambda: len(tokens) == 4 or len(client._engine.local_queues.all()) > 0)

        await asyncio.gather(*(one() for _ in range(4)))
        assert tokens == sorted(set(tokens))

    run_with_clients(flavour, body, _replicated(replica), ttl=60)


@blocking_and_asyncio
def test_an_uncertain_hold_is_exchanged_in_one_step(
    server: RedisServer, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange grants in one step, as the next waiter may have attempted and left by itself
    before a second step; and a late attempt of the released owner takes nothing."""

    async def body(bench: Bench) -> None:
        peer, claim, waiter = bench.peer(proxied=True), bench.claim(), bench.claim()
        await peer.look("name")  # opens the connection
        dropped = proxy.drop_next_reply()
        grant = await peer.take(claim)
        assert dropped.is_set()
        await peer.queue(waiter)
        monkeypatch.setattr(peer.backend, "attempt", _no_second_step)
        was_ours, granted = await peer.exchange(grant, waiter)
        assert was_ours
        assert isinstance(granted, Grant)
        assert [holder.token for holder in (await peer.look("name")).holders] == [granted.token]
        assert claim.owner in str(server.ask("HGET", f"{bench.namespace}:{{name}}", "g"))
        assert await peer.release(granted)

    with Proxy(server) as proxy:
        over(server.url, flavour, body, proxy.url)


async def _no_second_step(*_: object, **__: object) -> None:
    raise AssertionError("the next waiter was granted in a second step")


@blocking_and_asyncio
def test_a_shortening_renewal_is_sent_once(server: RedisServer, flavour: Flavour) -> None:
    """If it were sent again, the first one might still arrive, after a later extend."""

    async def body(bench: Bench) -> None:
        peer = bench.peer(proxied=True)
        grant = await peer.take(bench.claim("name", ttl=60))
        shorter = grant._replace(claim=grant.claim._replace(ttl=20))
        dropped = proxy.drop_next_reply()
        with pytest.raises(BackendUnavailable):
            await peer.extend(shorter, shorten=True)
        assert dropped.wait(SECONDS)
        dropped = proxy.drop_next_reply()
        assert not (await peer.extend(grant, shorten=False)).unknown
        assert dropped.wait(SECONDS)
        assert await peer.release(grant)

    with Proxy(server) as proxy:
        over(server.url, flavour, body, proxy.url)


@blocking_and_asyncio
def test_a_name_taken_by_redis_py_is_not_granted_again(
    server: RedisServer, flavour: Flavour
) -> None:
    """The shared key was deleted by hand: a retry is granted only together with the key."""

    async def body(bench: Bench) -> None:
        peer, claim = bench.peer(), bench.claim(bench.namespace)
        first = await peer.take(claim)
        server.ask("DEL", claim.name)
        assert (await peer.take(claim)).token == first.token
        assert server.ask("GET", claim.name) == claim.owner
        server.ask("DEL", claim.name)
        theirs = redis.Redis(server.host, server.port).lock(claim.name, timeout=60)
        assert theirs.acquire(blocking=False)
        await peer.queue(claim)
        assert not (await peer.look(claim.name)).holders
        theirs.release()
        assert (await peer.get(claim)).token > first.token

    over(f"{server.url}?interop=redis-py", flavour, body)


@blocking_and_asyncio
def test_a_waiter_that_has_just_given_up_does_not_hide_the_release(
    server: RedisServer, flavour: Flavour
) -> None:
    """Its attempt is refused as abandoned; the hold was ours and has ended."""

    async def body(bench: Bench) -> None:
        peer, waiter = bench.peer(), bench.claim()
        grant = await peer.take(bench.claim())
        key = f"{bench.namespace}:{{name}}"
        server.ask("HSET", key, "g", f" {waiter.owner}@{2**52}", "d", str(2**52))
        was_ours, answer = await peer.exchange(grant, waiter)
        assert was_ours is True
        assert isinstance(answer, Busy)
        assert (await peer.look("name")).holders == ()

    over(server.url, flavour, body)

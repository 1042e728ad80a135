"""A hand-over inside a client, and a grant that is asked for again: nobody gets what another
has."""

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
from stores.redis.bench import blocking_and_asyncio, over, until

SECONDS = 30.0


@pytest.fixture
def server(servers: Servers) -> RedisServer:
    return servers.of(RedisServer)


@pytest.fixture
def replica() -> Iterator[RedisServer]:
    """A replica, of a master of its own."""
    with RedisServer() as master, RedisServer(replica_of=master) as replica:
        replica.wait_linked()
        yield replica


def _replicated(replica: RedisServer) -> str:
    assert replica.replica_of is not None
    return f"{replica.replica_of.url}?replicas=1"


@blocking_and_asyncio
def test_replicas_that_are_late_take_nothing_from_an_heir(
    replica: RedisServer, flavour: Flavour
) -> None:
    """The release woke it, and it came by itself; when the exchange goes on, replicas lag."""

    async def body(bench: Bench) -> None:
        peer, heir = bench.peer(), bench.claim()
        grant = await peer.get(bench.claim())
        await peer.queue(heir)
        assert await peer.release(grant)
        its = await peer.get(heir)
        replica.pause()
        _, answer = await peer.exchange(grant, heir)  # its release is over, its heir is not
        assert isinstance(answer, Busy)
        assert [holder.token for holder in (await peer.look("name")).holders] == [its.token]
        replica.resume()
        assert await peer.release(its)

    over(_replicated(replica), flavour, body)


@blocking_and_asyncio
def test_replicas_that_were_late_leave_an_heir_to_itself(
    replica: RedisServer, flavour: Flavour
) -> None:
    """One whose grant was given back stands in no line, and comes again all the same."""

    async def body(bench: Bench) -> None:
        peer, heir = bench.peer(), bench.claim("other")
        grant = await peer.get(bench.claim())
        replica.pause()
        await peer.queue(heir)
        replica.resume()
        its = await peer.get(heir)
        replica.pause()
        _, answer = await peer.exchange(grant, heir)
        assert isinstance(answer, Busy)
        assert [holder.token for holder in (await peer.look("other")).holders] == [its.token]
        replica.resume()

    over(_replicated(replica), flavour, body)


@pytest.mark.usefixtures("no_recheck")
@blocking_and_asyncio
def test_a_client_with_replicas_hands_over(replica: RedisServer, flavour: Flavour) -> None:
    """The release of one wakes the next: nobody has to look by itself."""

    async def body(client: Any) -> None:
        tokens: list[int] = []

        async def one() -> None:
            async with client.lock("name", timeout=SECONDS) as lease:
                tokens.append(lease.token)
                await until(lambda: len(tokens) == 4 or len(client._engine.lines.all()) > 0)

        await asyncio.gather(*(one() for _ in range(4)))
        assert tokens == sorted(set(tokens))

    run_with_clients(flavour, body, _replicated(replica), ttl=60)


@blocking_and_asyncio
def test_a_hold_in_doubt_is_handed_over_in_one_step(
    server: RedisServer, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heir is not asked for after it may have come, and left, by itself; and what is still
    under way of the one who leaves finds nothing to take."""

    async def body(bench: Bench) -> None:
        peer, claim, heir = bench.peer(proxied=True), bench.claim(), bench.claim()
        await peer.look("name")  # opens the connection
        dropped = proxy.drop_next_reply()
        grant = await peer.take(claim)
        assert dropped.is_set()
        await peer.queue(heir)
        monkeypatch.setattr(peer.backend, "attempt", _not_on_its_behalf)
        was_ours, handed = await peer.exchange(grant, heir)
        assert was_ours
        assert isinstance(handed, Grant)
        assert [holder.token for holder in (await peer.look("name")).holders] == [handed.token]
        assert claim.owner in str(server.ask("HGET", f"{bench.namespace}:{{name}}", "g"))
        assert await peer.release(handed)

    with Proxy(server) as proxy:
        over(server.url, flavour, body, proxy.url)


async def _not_on_its_behalf(*_: object, **__: object) -> None:
    raise AssertionError("the heir was asked for in a second step")


@blocking_and_asyncio
def test_what_shortens_a_hold_is_sent_once(server: RedisServer, flavour: Flavour) -> None:
    """If it was sent again and answered, the first might still arrive, behind a later extend."""

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
def test_what_redis_py_took_is_not_granted_again(server: RedisServer, flavour: Flavour) -> None:
    """The key that both share was deleted by hand: a retry has the name only with the key."""

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

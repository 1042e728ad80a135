"""A server that refuses writes, or a user without the right to publish: a script does all or
nothing, and no wake-up is sent for a grant that is not stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import DIRECT_GRANT_SECONDS
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from servers.redis import RedisServer
from servers.resp import Reply
from stores.redis.helpers import blocking_and_asyncio, over, until

SECONDS = 30.0
RIGHTS = "+eval +evalsha +time +info +hget +hmget +hset +hdel +hexists +pexpire +publish +subscribe"
PLAIN = f"plain on >secret resetchannels ~* &* {RIGHTS}"
"""A user without the right to PUBSUB NUMSUB."""
MUTE = "mute on >secret ~* +@all resetchannels"
"""A user without the right to publish."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(users=[MUTE, PLAIN]) as server:
        yield server


def _mute(server: RedisServer) -> str:
    return f"redis://mute:secret@{server.host}:{server.port}/0"


async def join_queue(peer: Peer, claim: Claim) -> Busy:
    """Joins the queue with a channel: the first wait only subscribes."""
    await peer.wait(claim, await peer.queue(claim), now())
    return await peer.queue(claim)


def stored(server: RedisServer, bench: Bench) -> Reply:
    """All fields of the lock, sorted."""
    fields = server.ask("HGETALL", f"{bench.namespace}:{{name}}")
    assert isinstance(fields, list)
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return [str(word) for pair in sorted(pairs, key=str) for word in pair]


async def _fewer_than(server: RedisServer, replicas: str) -> None:
    """Makes the server refuse writes with fewer replicas than this; it has none."""
    server.ask("CONFIG", "SET", "min-replicas-to-write", replicas)
    role = "min_slaves_good_slaves:0" if replicas != "0" else "role:master"
    await until(lambda: role in str(server.ask("INFO", "replication")))


@blocking_and_asyncio
def test_a_grant_that_is_not_written_is_not_published(
    server: RedisServer, flavour: Flavour
) -> None:
    """Too few replicas: the release fails, the hold stays, and the waiter gets no message."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim()
        grant = await ours.take(bench.claim())
        busy = await join_queue(theirs, claim)
        await _fewer_than(server, "1")
        before = stored(server, bench)
        with pytest.raises(BackendUnavailable, match="NOREPLICAS"):
            await ours.release(grant)
        assert await theirs.wait(claim, busy, now() + 1.0) is None
        assert stored(server, bench) == before
        for work in (theirs.attempt(claim), ours.abandon(grant.claim)):
            with pytest.raises(BackendUnavailable, match="NOREPLICAS"):
                await work
        assert stored(server, bench) == before
        await _fewer_than(server, "0")
        assert await ours.release(grant)
        direct = await theirs.wait(claim, busy, now() + SECONDS)
        assert direct is not None
        assert [each.token for each in (await ours.look("name")).holders] == [direct.token]

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_release_without_memory_grants_directly(server: RedisServer, flavour: Flavour) -> None:
    """A release needs no memory, so it is done completely."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim()
        grant = await ours.take(bench.claim())
        busy = await join_queue(theirs, claim)
        server.ask("CONFIG", "SET", "maxmemory", "1")
        try:
            assert await ours.release(grant)
        finally:
            server.ask("CONFIG", "SET", "maxmemory", "0")
        direct = await theirs.wait(claim, busy, now() + SECONDS)
        assert direct is not None
        assert [each.token for each in (await ours.look("name")).holders] == [direct.token]

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_an_undelivered_grant_is_undone(server: RedisServer, flavour: Flavour) -> None:
    """The waiter is back at its position in the queue; the token is not reused."""

    async def body(bench: Bench) -> None:
        mute, theirs, claim = bench.peer(proxied=True), bench.peer(), bench.claim()
        grant = await mute.take(bench.claim())
        busy = await join_queue(theirs, claim)
        assert await mute.release(grant)
        info = await theirs.look("name")
        assert not info.holders
        assert len(info.waiters) == 1
        assert await theirs.wait(claim, busy, now() + 0.1) is None
        direct = int(str(server.ask("HGET", f"{bench.namespace}:{{name}}", "t")))
        assert direct > grant.token
        taken = await theirs.take(claim)
        assert taken.token > direct
        assert await theirs.release(taken)
        assert not (await theirs.look("name")).waiters

    over(server.url, flavour, body, _mute(server))


@blocking_and_asyncio
def test_a_user_who_may_not_publish_returns_permits(server: RedisServer, flavour: Flavour) -> None:
    """A release that can't publish wake-ups is still complete."""

    async def body(bench: Bench) -> None:
        mute, theirs = bench.peer(proxied=True), bench.peer()
        held = [await mute.take(bench.claim(mode=Mode.SLOTS, limit=2)) for _ in range(2)]
        waiting = [bench.claim(mode=Mode.SLOTS, limit=2) for _ in range(2)]
        for claim in waiting:
            await join_queue(theirs, claim)
        for grant in held:
            assert await mute.release(grant)
        taken = [await theirs.take(claim) for claim in waiting]
        assert sorted(grant.slots for grant in taken) == [(0,), (1,)]

    over(server.url, flavour, body, _mute(server))


@pytest.mark.parametrize("mode", list(Mode))
@blocking_and_asyncio
def test_a_user_without_numsub_wakes_waiters(
    server: RedisServer, flavour: Flavour, mode: Mode
) -> None:
    """The release is complete, it wakes the waiter, and ``check()`` names the missing right."""
    limit = 1 if mode is Mode.SLOTS else 0

    async def body(bench: Bench) -> None:
        plain, theirs = bench.peer(proxied=True), bench.peer()
        grant = await plain.take(
            bench.claim(mode=Mode.SLOTS if limit else Mode.EXCLUSIVE, limit=limit)
        )
        claim = bench.claim(mode=mode, limit=limit)
        busy = await join_queue(theirs, claim)
        assert await plain.release(grant)
        began = now()
        await theirs.wait(claim, busy, began + SECONDS)
        assert now() - began < SECONDS / 2, "the waiter was not woken"
        assert isinstance(await theirs.take(claim), Grant)
        details = [
            each.detail for each in await plain.run(plain.backend.probe()) if each.level != "ok"
        ]
        assert any("PUBSUB NUMSUB is not allowed" in detail for detail in details)

    over(server.url, flavour, body, f"redis://plain:secret@{server.host}:{server.port}/0")


@blocking_and_asyncio
def test_the_token_of_a_direct_grant_is_above_the_counter(
    server: RedisServer, flavour: Flavour
) -> None:
    """If the clock went back, tokens still differ and grow."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim()
        grant = await ours.take(bench.claim())
        ahead = grant.token + 3_600_000_000
        server.ask("HSET", f"{bench.namespace}:{{name}}", "t", str(ahead))
        busy = await join_queue(theirs, claim)
        assert await ours.release(grant)
        direct = await theirs.wait(claim, busy, now() + SECONDS)
        assert direct is not None
        assert direct.token == ahead + 1
        assert await theirs.release(direct)
        assert (await ours.take(bench.claim())).token == ahead + 2

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_direct_grant_lasts_no_longer_than_the_stale_time(
    server: RedisServer, flavour: Flavour
) -> None:
    """Whatever the entry in the queue says."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim()
        grant = await ours.take(bench.claim())
        await join_queue(theirs, claim)
        key, field = f"{bench.namespace}:{{name}}", f"w:{claim.owner}"
        entry = str(server.ask("HGET", key, field)).split(" ")
        entry[7] = "999999999"
        server.ask("HSET", key, field, " ".join(entry))
        assert await ours.release(grant)
        (holder,) = (await ours.look("name")).holders
        assert holder.remaining <= DIRECT_GRANT_SECONDS

    over(server.url, flavour, body)


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.EXCLUSIVE])
@blocking_and_asyncio
def test_a_waiter_that_was_not_refreshed_is_skipped(
    server: RedisServer, flavour: Flavour, mode: Mode
) -> None:
    """Its client is subscribed, but its renewer did not refresh it in time: the next waiter is
    granted."""

    async def body(bench: Bench) -> None:
        ours, stale, theirs = bench.peer(), bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        first, second = bench.claim(mode=mode), bench.claim(mode=mode)
        await join_queue(stale, first)
        busy = await join_queue(theirs, second)
        key, field = f"{bench.namespace}:{{name}}", f"w:{first.owner}"
        entry = str(server.ask("HGET", key, field)).split(" ")
        entry[3] = str(int(entry[3]) - 3_600_000)
        server.ask("HSET", key, field, " ".join(entry))
        assert await ours.release(grant)
        assert server.ask("HEXISTS", key, field) == 0, "the entry is still in the queue"
        await theirs.wait(second, busy, now() + DIRECT_GRANT_SECONDS / 2)
        assert isinstance(await theirs.take(second), Grant)

    over(server.url, flavour, body)

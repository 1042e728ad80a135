"""A server that refuses to write, or a user who may not publish: what a script began is whole, or
never was, and nobody is told of a grant that is not stored."""

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
from stores.redis.bench import blocking_and_asyncio, over, until

SECONDS = 30.0
RIGHTS = "+eval +evalsha +time +info +hget +hmget +hset +hdel +hexists +pexpire +publish +subscribe"
PLAIN = f"plain on >secret resetchannels ~* &* {RIGHTS}"
"""A user who may not ask who listens (``PUBSUB NUMSUB``)."""
MUTE = "mute on >secret ~* +@all resetchannels"
"""A user who may not publish anywhere."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(users=[MUTE, PLAIN]) as server:
        yield server


def _mute(server: RedisServer) -> str:
    return f"redis://mute:secret@{server.host}:{server.port}/0"


async def stand_in_line(peer: Peer, claim: Claim) -> Busy:
    """Where it can be woken: the first wait only begins to listen."""
    await peer.wait(claim, await peer.queue(claim), now())
    return await peer.queue(claim)


def stored(server: RedisServer, bench: Bench) -> Reply:
    """All fields of the name, in order."""
    fields = server.ask("HGETALL", f"{bench.namespace}:{{name}}")
    assert isinstance(fields, list)
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return [str(word) for pair in sorted(pairs, key=str) for word in pair]


async def _fewer_than(server: RedisServer, replicas: str) -> None:
    """From here on the server writes only with so many replicas; it has none."""
    server.ask("CONFIG", "SET", "min-replicas-to-write", replicas)
    role = "min_slaves_good_slaves:0" if replicas != "0" else "role:master"
    await until(lambda: role in str(server.ask("INFO", "replication")))


@blocking_and_asyncio
def test_a_grant_that_is_not_written_is_not_told(server: RedisServer, flavour: Flavour) -> None:
    """Too few replicas: the release fails, its hold stays, and the waiter hears nothing."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim()
        grant = await ours.take(bench.claim())
        busy = await stand_in_line(theirs, claim)
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
        handed = await theirs.wait(claim, busy, now() + SECONDS)
        assert handed is not None
        assert [each.token for each in (await ours.look("name")).holders] == [handed.token]

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_release_without_memory_hands_over(server: RedisServer, flavour: Flavour) -> None:
    """Letting go needs no memory, so the whole of it is done."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim()
        grant = await ours.take(bench.claim())
        busy = await stand_in_line(theirs, claim)
        server.ask("CONFIG", "SET", "maxmemory", "1")
        try:
            assert await ours.release(grant)
        finally:
            server.ask("CONFIG", "SET", "maxmemory", "0")
        handed = await theirs.wait(claim, busy, now() + SECONDS)
        assert handed is not None
        assert [each.token for each in (await ours.look("name")).holders] == [handed.token]

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_grant_that_nobody_hears_is_taken_back(server: RedisServer, flavour: Flavour) -> None:
    """The waiter is back in its place, the token is spent."""

    async def body(bench: Bench) -> None:
        mute, theirs, claim = bench.peer(proxied=True), bench.peer(), bench.claim()
        grant = await mute.take(bench.claim())
        busy = await stand_in_line(theirs, claim)
        assert await mute.release(grant)
        standing = await theirs.look("name")
        assert not standing.holders
        assert len(standing.waiters) == 1
        assert await theirs.wait(claim, busy, now() + 0.1) is None
        handed = int(str(server.ask("HGET", f"{bench.namespace}:{{name}}", "t")))
        assert handed > grant.token
        taken = await theirs.take(claim)
        assert taken.token > handed
        assert await theirs.release(taken)
        assert not (await theirs.look("name")).waiters

    over(server.url, flavour, body, _mute(server))


@blocking_and_asyncio
def test_permits_come_back_from_who_may_not_publish(server: RedisServer, flavour: Flavour) -> None:
    """A release that can't wake anybody is a whole release."""

    async def body(bench: Bench) -> None:
        mute, theirs = bench.peer(proxied=True), bench.peer()
        held = [await mute.take(bench.claim(mode=Mode.SLOTS, limit=2)) for _ in range(2)]
        waiting = [bench.claim(mode=Mode.SLOTS, limit=2) for _ in range(2)]
        for claim in waiting:
            await stand_in_line(theirs, claim)
        for grant in held:
            assert await mute.release(grant)
        taken = [await theirs.take(claim) for claim in waiting]
        assert sorted(grant.slots for grant in taken) == [(0,), (1,)]

    over(server.url, flavour, body, _mute(server))


@pytest.mark.parametrize("mode", list(Mode))
@blocking_and_asyncio
def test_who_may_not_ask_who_listens_wakes_all_the_same(
    server: RedisServer, flavour: Flavour, mode: Mode
) -> None:
    """The release is whole, the waiter is woken by it, and ``check()`` tells what is missing."""
    limit = 1 if mode is Mode.SLOTS else 0

    async def body(bench: Bench) -> None:
        plain, theirs = bench.peer(proxied=True), bench.peer()
        grant = await plain.take(
            bench.claim(mode=Mode.SLOTS if limit else Mode.EXCLUSIVE, limit=limit)
        )
        claim = bench.claim(mode=mode, limit=limit)
        busy = await stand_in_line(theirs, claim)
        assert await plain.release(grant)
        began = now()
        await theirs.wait(claim, busy, began + SECONDS)
        assert now() - began < SECONDS / 2, "nobody was woken"
        assert isinstance(await theirs.take(claim), Grant)
        told = [
            each.detail for each in await plain.run(plain.backend.probe()) if each.level != "ok"
        ]
        assert any("PUBSUB NUMSUB is not allowed" in detail for detail in told)

    over(server.url, flavour, body, f"redis://plain:secret@{server.host}:{server.port}/0")


@blocking_and_asyncio
def test_a_handed_token_is_the_counter_s_where_that_is_ahead(
    server: RedisServer, flavour: Flavour
) -> None:
    """A clock that went back does not make two holders' tokens equal, or out of order."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim()
        grant = await ours.take(bench.claim())
        ahead = grant.token + 3_600_000_000
        server.ask("HSET", f"{bench.namespace}:{{name}}", "t", str(ahead))
        busy = await stand_in_line(theirs, claim)
        assert await ours.release(grant)
        handed = await theirs.wait(claim, busy, now() + SECONDS)
        assert handed is not None
        assert handed.token == ahead + 1
        assert await theirs.release(handed)
        assert (await ours.take(bench.claim())).token == ahead + 2

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_handed_hold_lasts_no_longer_than_a_waiter_is_believed(
    server: RedisServer, flavour: Flavour
) -> None:
    """Whatever an entry in line says."""

    async def body(bench: Bench) -> None:
        ours, theirs, claim = bench.peer(), bench.peer(), bench.claim()
        grant = await ours.take(bench.claim())
        await stand_in_line(theirs, claim)
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
    """It listens still, but its renewer said nothing for too long: the next one has the turn."""

    async def body(bench: Bench) -> None:
        ours, stale, theirs = bench.peer(), bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        first, second = bench.claim(mode=mode), bench.claim(mode=mode)
        await stand_in_line(stale, first)
        busy = await stand_in_line(theirs, second)
        key, field = f"{bench.namespace}:{{name}}", f"w:{first.owner}"
        entry = str(server.ask("HGET", key, field)).split(" ")
        entry[3] = str(int(entry[3]) - 3_600_000)
        server.ask("HSET", key, field, " ".join(entry))
        assert await ours.release(grant)
        assert server.ask("HEXISTS", key, field) == 0, "it no longer stands in line"
        await theirs.wait(second, busy, now() + DIRECT_GRANT_SECONDS / 2)
        assert isinstance(await theirs.take(second), Grant)

    over(server.url, flavour, body)

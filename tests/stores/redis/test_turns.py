"""A hold that comes with the wake-up: who may rely on it, and for how long."""

from __future__ import annotations

import threading

import pytest

import holdfast
from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import DIRECT_GRANT_SECONDS, Settings
from holdfast.io.clock import now
from holdfast.stores.redis.backend import _wakeup_key
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from holdfast.url import open_store
from servers.process import wait_until
from servers.redis import RedisServer
from servers.registry import Servers
from stores.redis.bench import blocking_and_asyncio, channels, listening, over, scripts_run

SECONDS = 30.0


@pytest.fixture
def server(servers: Servers) -> RedisServer:
    return servers.of(RedisServer)


async def _one_holds_one_waits(bench: Bench) -> tuple[Peer, Grant, Peer, Claim, Busy]:
    """Each in a client of its own."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    claim = bench.claim()
    return ours, grant, theirs, claim, await _stand_in_line(theirs, claim)


async def _stand_in_line(peer: Peer, claim: Claim) -> Busy:
    """Where it can be woken: the first wait only begins to listen."""
    await peer.wait(claim, await peer.queue(claim), now())
    return await peer.queue(claim)


@blocking_and_asyncio
def test_a_hand_over_is_one_request(server: RedisServer, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        warm = bench.peer()
        await warm.release(await warm.take(bench.claim()))  # the server knows the scripts
        ours, grant, theirs, claim, busy = await _one_holds_one_waits(bench)
        before = scripts_run(server)
        assert await ours.release(grant)
        brought = await theirs.wait(claim, busy, now() + SECONDS)
        assert scripts_run(server) - before == 1
        assert brought is not None
        assert brought.token > grant.token
        assert brought.seconds == DIRECT_GRANT_SECONDS
        standing = await ours.look("name")
        assert [holder.token for holder in standing.holders] == [brought.token]
        assert not standing.waiters
        assert await theirs.release(brought)

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_line_is_handed_down(server: RedisServer, flavour: Flavour) -> None:
    """Each in turn, and the line is empty in the end."""

    async def body(bench: Bench) -> None:
        peers = [bench.peer() for _ in range(5)]
        grant = await peers[0].take(bench.claim())
        claims = [bench.claim() for _ in peers[1:]]
        answers = [
            await _stand_in_line(peer, claim) for peer, claim in zip(peers[1:], claims, strict=True)
        ]
        giver = peers[0]
        for peer, claim, busy in zip(peers[1:], claims, answers, strict=True):
            assert await giver.release(grant)
            brought = await peer.wait(claim, busy, now() + SECONDS)
            assert brought is not None
            assert brought.token > grant.token
            giver, grant = peer, brought
        assert await giver.release(grant)
        standing = await giver.look("name")
        assert not standing.holders
        assert not standing.waiters

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_turn_ends_although_its_connection_is_gone(server: RedisServer, flavour: Flavour) -> None:
    """The reply to its release comes behind the next one's wake-up, or not at all."""

    async def body(bench: Bench) -> None:
        ours, grant, theirs, claim, busy = await _one_holds_one_waits(bench)
        assert await ours.release(grant)
        brought = await theirs.wait(claim, busy, now() + SECONDS)
        assert brought is not None
        again = bench.claim()
        busy = await _stand_in_line(ours, again)
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert await theirs.release(brought) is True
        handed = await ours.wait(again, busy, now() + SECONDS)
        assert handed is not None
        assert [each.token for each in (await theirs.look("name")).holders] == [handed.token]

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_ring_from_before_the_attempt_is_no_grant(server: RedisServer, flavour: Flavour) -> None:
    """It may tell of a turn that was missed: that hold is over, or not its any more."""

    async def body(bench: Bench) -> None:
        _, grant, theirs, claim, busy = await _one_holds_one_waits(bench)
        (channel,) = channels(server, bench.namespace)
        server.ask("PUBLISH", channel, f"{_wakeup_key(claim.owner)} {grant.token}")
        assert await theirs.wait(claim, busy, now() + SECONDS) is None

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_who_does_not_come_for_its_turn_misses_it(server: RedisServer, flavour: Flavour) -> None:
    """It listens, so it was granted; but it neither renews the hold nor asks for it."""

    async def body(bench: Bench) -> None:
        ours, frozen, theirs = bench.peer(), bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        first = bench.claim(ttl=2.0)  # else it would be HANDED_SECONDS
        busy = await _stand_in_line(frozen, first)
        second = bench.claim()
        await theirs.queue(second)
        assert await ours.release(grant)
        taken = await theirs.get(second, SECONDS)
        brought = await frozen.wait(first, busy, now() + SECONDS)
        assert brought is not None
        assert brought.token < taken.token
        assert first.owner in (await frozen.renew([brought])).lost
        assert await theirs.release(taken)

    over(server.url, flavour, body)


@blocking_and_asyncio
@pytest.mark.parametrize("option", ["interop=redis-py", "replicas=1", "loss_protection=on"])
def test_nobody_is_granted_whose_own_options_forbid_it(
    server: RedisServer, flavour: Flavour, option: str
) -> None:
    """Such a waiter has more to do for a grant than the release of a plain client does."""

    async def body(bench: Bench) -> None:
        ours = bench.peer()
        settings = Settings(namespace=bench.namespace)
        theirs = Peer(open_store(f"{server.url}?{option}", settings), flavour, bench.workers)
        try:
            grant = await ours.take(bench.claim())
            claim = bench.claim()
            busy = await _stand_in_line(theirs, claim)
            assert await ours.release(grant)
            assert await theirs.wait(claim, busy, now() + SECONDS) is None
            assert not (await ours.look("name")).holders
            await theirs.abandon(claim)
        finally:
            await theirs.close()

    over(server.url, flavour, body)


def _left(locks: holdfast.Locks) -> float:
    return max((each.remaining for each in locks.inspect("name").holders), default=0.0)


@pytest.mark.parametrize("renew", [True, False])
def test_a_turn_lasts_as_long_as_any_hold(server: RedisServer, namespace: str, renew: bool) -> None:
    """The renewer renews it at once; where nothing is renewed, its waiter asks for the ttl."""
    with (
        holdfast.connect(server.url, namespace=namespace) as ours,
        holdfast.connect(server.url, namespace=namespace) as theirs,
    ):
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with theirs.lock("name", ttl=60, renew=renew, timeout=SECONDS) as lease:
                held.set()
                assert done.wait(SECONDS)
                lease.check()

        worker = threading.Thread(target=hold)
        with ours.lock("name"):
            worker.start()
            wait_until("the waiter", lambda: listening(server, namespace) == 1)
        assert held.wait(SECONDS)
        wait_until("the renewal", lambda: _left(ours) > 2 * DIRECT_GRANT_SECONDS)
        done.set()
        worker.join()
        assert not worker.is_alive()

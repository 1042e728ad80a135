"""Direct grants: a hold that arrives with the wake-up, when it is valid, and for how long."""

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
from stores.redis.helpers import blocking_and_asyncio, channels, listening, over, scripts_run

SECONDS = 30.0


@pytest.fixture
def server(servers: Servers) -> RedisServer:
    return servers.of(RedisServer)


async def _one_holds_one_waits(bench: Bench) -> tuple[Peer, Grant, Peer, Claim, Busy]:
    """Holder and waiter, each in a client of its own."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    claim = bench.claim()
    return ours, grant, theirs, claim, await _join_queue(theirs, claim)


async def _join_queue(peer: Peer, claim: Claim) -> Busy:
    """Joins the queue with a channel: the first wait only subscribes."""
    await peer.wait(claim, await peer.queue(claim), now())
    return await peer.queue(claim)


@blocking_and_asyncio
def test_a_direct_grant_is_one_request(server: RedisServer, flavour: Flavour) -> None:
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
        info = await ours.look("name")
        assert [holder.token for holder in info.holders] == [brought.token]
        assert not info.waiters
        assert await theirs.release(brought)

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_queue_is_granted_in_order(server: RedisServer, flavour: Flavour) -> None:
    """The waiters are granted in order, and the queue is empty at the end."""

    async def body(bench: Bench) -> None:
        peers = [bench.peer() for _ in range(5)]
        grant = await peers[0].take(bench.claim())
        claims = [bench.claim() for _ in peers[1:]]
        answers = [
            await _join_queue(peer, claim) for peer, claim in zip(peers[1:], claims, strict=True)
        ]
        giver = peers[0]
        for peer, claim, busy in zip(peers[1:], claims, answers, strict=True):
            assert await giver.release(grant)
            brought = await peer.wait(claim, busy, now() + SECONDS)
            assert brought is not None
            assert brought.token > grant.token
            giver, grant = peer, brought
        assert await giver.release(grant)
        info = await giver.look("name")
        assert not info.holders
        assert not info.waiters

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_release_is_done_although_its_connection_is_closed(
    server: RedisServer, flavour: Flavour
) -> None:
    """The reply to its release arrives after the wake-up of the next waiter, or not at all."""

    async def body(bench: Bench) -> None:
        ours, grant, theirs, claim, busy = await _one_holds_one_waits(bench)
        assert await ours.release(grant)
        brought = await theirs.wait(claim, busy, now() + SECONDS)
        assert brought is not None
        again = bench.claim()
        busy = await _join_queue(ours, again)
        server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert await theirs.release(brought) is True
        direct = await ours.wait(again, busy, now() + SECONDS)
        assert direct is not None
        assert [each.token for each in (await theirs.look("name")).holders] == [direct.token]

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_wake_up_from_before_the_attempt_is_no_grant(
    server: RedisServer, flavour: Flavour
) -> None:
    """It may be about an earlier grant that was missed: that hold has ended, or changed owner."""

    async def body(bench: Bench) -> None:
        _, grant, theirs, claim, busy = await _one_holds_one_waits(bench)
        (channel,) = channels(server, bench.namespace)
        server.ask("PUBLISH", channel, f"{_wakeup_key(claim.owner)} {grant.token}")
        assert await theirs.wait(claim, busy, now() + SECONDS) is None

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_direct_grant_that_is_not_taken_ends(server: RedisServer, flavour: Flavour) -> None:
    """Its client is subscribed, so it was granted; but it neither renews the hold nor attempts."""

    async def body(bench: Bench) -> None:
        ours, frozen, theirs = bench.peer(), bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        first = bench.claim(ttl=2.0)  # otherwise it would be DIRECT_GRANT_SECONDS
        busy = await _join_queue(frozen, first)
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
def test_no_direct_grant_if_the_waiter_s_options_forbid_it(
    server: RedisServer, flavour: Flavour, option: str
) -> None:
    """A grant of such a waiter needs more than the release of a plain client does."""

    async def body(bench: Bench) -> None:
        ours = bench.peer()
        settings = Settings(namespace=bench.namespace)
        theirs = Peer(open_store(f"{server.url}?{option}", settings), flavour, bench.workers)
        try:
            grant = await ours.take(bench.claim())
            claim = bench.claim()
            busy = await _join_queue(theirs, claim)
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
def test_a_direct_grant_gets_its_full_ttl(server: RedisServer, namespace: str, renew: bool) -> None:
    """The renewer renews it at once; without renewal, the waiter attempts, to get its full ttl."""
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

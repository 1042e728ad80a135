"""Nodes that answer late: their votes count, and no hold and no wake-up is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.io.clock import now
from holdfast.stores.redlock import broadcast_aio, wakeups
from holdfast.testing import Flavour
from servers.process import wait_until
from servers.redis import RedisServer
from stores.client_runner import run_with_clients
from stores.redis.helpers import (
    blocking_and_asyncio,
    channels,
    scripts_run,
    until,
    waiter_sleeps,
)
from stores.redlock import helpers
from stores.redlock.helpers import KEY, Nodes, held_by

three, five = helpers.three, helpers.five


@blocking_and_asyncio
def test_a_late_node_votes_although_the_round_does_not_wait(three: Nodes, flavour: Flavour) -> None:
    """Also the first time, when the node has not run the script before."""
    late = three.nodes[2]

    async def body(client: Any) -> None:
        await client.inspect("other")  # opens the connections
        three.proxies[2].hold_replies()
        async with client.lock("name"):
            await until(lambda: held_by(late))
        await until(lambda: not held_by(late))
        three.proxies[2].let_replies()

    run_with_clients(flavour, body, three.proxied_url, ttl=10)


@blocking_and_asyncio
def test_a_node_that_was_left_out_gets_the_release_later(three: Nodes, flavour: Flavour) -> None:
    """It reads the grant from a connection that was given up, and must not keep its vote."""
    late = three.nodes[2]

    async def body(client: Any) -> None:
        await client.inspect("other")  # opens the connections
        late.pause()
        lease = await client.lock("name").acquire()
        await asyncio.sleep(1.2)
        await client.inspect("other")  # leaves the node out
        assert await lease.release() is True
        late.resume()
        await until(lambda: late.ask("EXISTS", KEY) == 1)  # it has read the grant
        await _no_vote_is_left(client, late)

    run_with_clients(flavour, body, three.url, ttl=60)


@blocking_and_asyncio
def test_a_node_that_only_got_a_renewal_gets_the_release_later(
    three: Nodes, flavour: Flavour
) -> None:
    """It was down when the lock was acquired; the renewer restored the hold there."""
    late, proxy = three.nodes[2], three.proxies[2]

    async def body(client: Any) -> None:
        await client.inspect("other")
        proxy.refuse()
        await client.inspect("other")  # leaves the node out
        lease = await client.lock("name").acquire()
        proxy.accept()
        await until(lambda: held_by(late))
        proxy.refuse()
        assert await lease.release() is True
        proxy.accept()
        await _no_vote_is_left(client, late)

    run_with_clients(flavour, body, three.proxied_url, ttl=3)


def _names(node: RedisServer) -> list[str]:
    keys = node.ask("KEYS", "*{*}")
    assert isinstance(keys, list)
    return [str(key) for key in keys]


async def _no_vote_is_left(client: Any, late: RedisServer) -> None:
    deadline = now() + 20.0
    await client.inspect("other")
    while votes := [key for key in _names(late) if late.ask("HEXISTS", key, "x")]:
        assert now() < deadline, f"votes that nobody holds are left behind: {votes}"
        await asyncio.sleep(0.1)
        await client.inspect("other")


@blocking_and_asyncio
def test_a_release_that_a_broken_connection_lost_is_sent_again(
    three: Nodes, flavour: Flavour
) -> None:
    """Its round had ended without the reply of this node."""
    late, proxy = three.nodes[2], three.proxies[2]

    async def body(client: Any) -> None:
        lease = await client.lock("name").acquire()
        await until(lambda: held_by(late))
        proxy.stall()
        assert await lease.release() is True
        proxy.cut()
        proxy.resume()
        await _no_vote_is_left(client, late)

    run_with_clients(flavour, body, three.proxied_url, ttl=60)


LOCKS: dict[str, Callable[[Any], Any]] = {
    "lock": lambda client: client.lock("name", renew=False),
    "reader": lambda client: client.rwlock("name", renew=False).read(),
    "slots": lambda client: client.semaphore("name", 3, permits=2, renew=False),
}


@pytest.mark.parametrize("kind", LOCKS)
@blocking_and_asyncio
def test_a_hold_without_the_votes_of_some_nodes_is_not_lost(
    five: Nodes, flavour: Flavour, kind: str
) -> None:
    """Two of five nodes never voted for the hold, one lost it, one is down: no other claim was
    granted, so the release reports no loss."""

    async def body(client: Any, others: Any) -> None:
        await client.inspect("other")
        for node in five.nodes:
            node.ask("SCRIPT", "FLUSH")
        for proxy in five.proxies[3:]:
            proxy.hold_replies()
        lease = await LOCKS[kind](client).acquire()
        assert [node.ask("EXISTS", KEY) for node in five.nodes] == [1, 1, 1, 0, 0]
        for proxy in five.proxies[3:]:
            proxy.let_replies()
        five.nodes[0].wipe()
        five.nodes[1].kill()
        if kind != "slots":
            assert await others.lock("name").acquire(blocking=False) is None
        assert await lease.release() is True
        assert not lease.lost

    run_with_clients(flavour, body, five.proxied_url, five.url, ttl=10)


@blocking_and_asyncio
def test_the_release_of_a_revoked_hold_reports_the_loss(three: Nodes, flavour: Flavour) -> None:
    """Nodes that know that the hold is over report it, also those that never voted for it."""

    async def body(client: Any) -> None:
        lease = await client.lock("name").acquire()
        await client.break_lock("name", reason="a test")
        assert await lease.release() is False

    run_with_clients(flavour, body, three.url, ttl=10)


@blocking_and_asyncio
def test_a_writer_granted_without_a_node_leaves_no_intent_there(
    three: Nodes, flavour: Flavour
) -> None:
    """Its release removes the intent also on a node where a reader held until the end."""
    left_behind = three.nodes[2]

    async def body(ours: Any, theirs: Any) -> None:
        reader = await theirs.rwlock("name", renew=False).read().acquire()
        for node in three.nodes[:2]:
            node.ask("DEL", KEY)
        async with ours.rwlock("name").write():
            await until(lambda: left_behind.ask("HEXISTS", KEY, "i") == 1)
        await until(lambda: left_behind.ask("HEXISTS", KEY, "i") == 0)
        assert await reader.release() is False

    run_with_clients(flavour, body, three.url, three.url, ttl=60)


@blocking_and_asyncio
def test_a_node_whose_own_vote_is_higher_is_not_raised(three: Nodes, flavour: Flavour) -> None:
    """A vote that arrived too late may be above the token that the others agree on: that node
    keeps its token and does not count for the lower one."""

    async def body(client: Any) -> None:
        async with client.lock("name") as first:
            pass
        ahead = first.token + 3_600_000_000
        three.nodes[1].ask("HSET", KEY, "c", str(ahead))
        three.nodes[2].ask("HSET", KEY, "c", str(ahead + 7))
        before = scripts_run(three.nodes[2])
        three.proxies[2].hold_replies()
        async with client.lock("name") as second:
            assert second.token == ahead + 1
            # The vote, and the request to raise its token.
            await until(lambda: scripts_run(three.nodes[2]) == before + 2)
            tokens = [node.ask("HGET", KEY, "xt") for node in three.nodes]
            assert tokens == [str(ahead + 1), str(ahead + 1), str(ahead + 8)]
        three.proxies[2].let_replies()
        async with client.lock("name") as third:
            assert third.token > second.token

    run_with_clients(flavour, body, three.proxied_url, ttl=10)


@pytest.mark.usefixtures("no_recheck")
@blocking_and_asyncio
def test_a_waiter_woken_before_all_nodes_have_released_retries(
    three: Nodes, flavour: Flavour
) -> None:
    """One node publishes a release that has not reached the others yet. There is no second
    wake-up."""

    async def body(ours: Any, theirs: Any) -> None:
        async def wait_for_it() -> None:
            async with theirs.lock("name", timeout=120):
                pass

        lease = await ours.lock("name", renew=False).acquire()
        waiting = asyncio.create_task(wait_for_it())
        # Long enough that the hold does not count as young.
        rests = partial(waiter_sleeps, three.nodes[0])
        await asyncio.to_thread(wait_until, "the waiter to rest", rests)
        for proxy in three.proxies[1:]:
            proxy.stall()
        before = scripts_run(three.nodes[1])
        releasing = asyncio.create_task(lease.release())
        await until(lambda: not held_by(three.nodes[0]))
        await until(lambda: scripts_run(three.nodes[1]) > before)
        assert not waiting.done()
        for proxy in three.proxies[1:]:
            proxy.resume()
        assert await releasing is True
        await asyncio.wait_for(waiting, 30)  # long before the re-check

    run_with_clients(flavour, body, three.proxied_url, three.url, ttl=300)


def test_a_late_reply_does_not_hide_another_that_is_pending(
    three: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has answered one round and then hangs is known to be slow all the time."""
    monkeypatch.setattr(broadcast_aio, "UNRESPONSIVE_SECONDS", 60.0)
    late, proxy = three.nodes[2], three.proxies[2]

    async def body(client: Any) -> None:
        await client.inspect("other")  # opens the connections
        connection = client._engine.backend._broadcast._connections[2]
        proxy.hold_replies()
        lease = await client.lock("name").acquire()
        await until(lambda: held_by(late))
        first = connection.unread_since
        assert first is not None
        late.pause()
        await lease.release()
        proxy.let_replies()
        await until(lambda: connection.unread_since != first)
        assert connection.unread_since is not None
        late.resume()
        await until(lambda: connection.unread_since is None)

    run_with_clients(Flavour.ASYNCIO, body, three.proxied_url, ttl=60)


@blocking_and_asyncio
def test_a_channel_beyond_the_limit_is_unsubscribed(
    three: Nodes, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "MOST_CHANNELS", 2)
    names = [f"name {number}" for number in range(5)]

    def subscribed() -> int:
        return len(channels(three.nodes[0], "holdfast"))

    async def body(ours: Any, theirs: Any) -> None:
        leases = [await ours.lock(name).acquire() for name in names]
        waiting = []
        for name in names:
            waiting.append(asyncio.create_task(theirs.lock(name, timeout=60).acquire()))
            expected = min(len(waiting), 2)
            await until(lambda: subscribed() == expected)  # noqa: B023
        for lease in leases:
            await lease.release()
        for lease in await asyncio.gather(*waiting):
            await lease.release()
        await until(lambda: subscribed() == 0)

    run_with_clients(flavour, body, three.url, three.url, ttl=60)

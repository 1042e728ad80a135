"""Who decides over a claim's node on ZooKeeper: several threads may at once, and one of them does.

The session's thread takes their places from those whom nobody keeps. That it does so in the instant
in which somebody is let in is rare, and forced here.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kazoo.client import KazooClient

import holdfast
from holdfast.claim import Busy, Claim, Grant
from holdfast.io.clock import now
from holdfast.stores.zookeeper import node as zookeeper_entry
from holdfast.stores.zookeeper.client.packets import Request
from holdfast.stores.zookeeper.node import ClaimNode, NodeState
from holdfast.stores.zookeeper.session import ZooKeeperSession
from holdfast.stores.zookeeper.wakeups import ListingPrefetch
from holdfast.testing import Flavour
from holdfast.testing.clients import open_client, run_here
from holdfast.testing.contract.bench import ACROSS, Bench, Peer
from holdfast.testing.workers import Workers
from servers.process import wait_until
from stores.claims import claim_of
from stores.redis.bench import blocking_and_asyncio, over, until
from stores.zookeeper import helpers
from stores.zookeeper.helpers import TTL, QuickServer, nodes_of

SOON = 60.0
server = helpers.server


@pytest.fixture
def give_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes the session's thread of a client take its waiter for one that nobody keeps, when the
    look by which that is to be let in has just been answered."""
    answered = ListingPrefetch._listed

    def prepare(store: Any) -> None:
        def answered_and_given_up(look: Any, request: Request) -> None:
            if look._session not in store.sessions.values():
                answered(look, request)
                return
            monkeypatch.undo()
            called, look._wait_end = look._wait_end, threading.Event()
            answered(look, request)
            (entry,) = store.entries.values()
            entry.refreshed = -math.inf
            store.clean_up(look._session, now())
            called.set()

        monkeypatch.setattr(ListingPrefetch, "_listed", answered_and_given_up)

    return prepare


async def _wait(peer: Peer, claim: Claim) -> asyncio.Task[Grant | None]:
    """A wait that has begun to watch."""
    busy = await peer.queue(claim)
    waiting = asyncio.create_task(peer.wait(claim, busy, now() + ACROSS))
    (session,) = peer.store.sessions.values()  # type: ignore[attr-defined]
    await until(lambda: bool(session.watches))
    await peer.look(claim.name)  # behind the request that sets the watch
    return waiting


@blocking_and_asyncio
def test_who_is_given_up_as_it_is_woken_is_not_let_in(
    server: QuickServer, flavour: Flavour, kazoo: KazooClient, give_up: Callable[[Any], None]
) -> None:
    """It stood first when it looked, but its node is about to be deleted: the next is let in."""

    async def body(bench: Bench) -> None:
        ours, theirs, others = bench.peer(), bench.peer(), bench.peer()
        held = await theirs.take(bench.claim())
        claim, behind = bench.claim(), bench.claim()
        give_up(ours.store)
        waiting = await _wait(ours, claim)
        getting = await _wait(others, behind)
        assert await theirs.release(held)
        assert await waiting is None
        taken = await getting or await others.get(behind)
        back = asyncio.create_task(ours.get(claim, ACROSS))
        await bench.in_line(others, "name", 1)
        assert await others.release(taken)
        again = await back
        assert again.token > taken.token
        assert await ours.release(again)
        assert nodes_of(kazoo, f"/{bench.namespace}/locks/name") == []

    over(server.url, flavour, body)


async def _stands(opened: Any, number: int) -> None:
    """Returns once so many wait."""
    async with asyncio.timeout(SOON):
        while len((await opened.inspect("name")).waiters) < number:
            pass


@blocking_and_asyncio
def test_a_client_is_inside_only_where_its_node_is(
    server: QuickServer, namespace: str, flavour: Flavour, give_up: Callable[[Any], None]
) -> None:
    """The same through the clients: whoever is inside is the one that the store shows."""

    async def contend(workers: Workers) -> list[int]:
        all_opened = [
            open_client(server.url, flavour, workers.run, namespace=namespace, ttl=TTL)
            for _ in range(3)
        ]
        first, second, third = all_opened
        store: Any = getattr(second, "_inner", second)._engine.store
        give_up(store)
        order = []

        async def hold(number: int) -> None:
            opened = all_opened[number]
            async with opened.lock("name", timeout=SOON) as lease:
                order.append(number)
                # Behind all that its own session has sent.
                holders = (await opened.inspect("name")).holders
                assert [holder.token for holder in holders] == [lease.token]

        async with first, second, third:
            async with first.lock("name"):
                tasks = []
                for number in (1, 2):
                    tasks.append(asyncio.create_task(hold(number)))
                    await _stands(first, number)
                (session,) = store.sessions.values()
                await until(lambda: bool(session.watches))
                await second.inspect("name")  # behind the request that sets the watch
            await asyncio.gather(*tasks)
        return order

    async def run() -> list[int]:
        workers = Workers()
        try:
            async with asyncio.timeout(2 * SOON):
                return await contend(workers)
        finally:
            workers.close()

    assert asyncio.run(run()) == [2, 1]


@blocking_and_asyncio
def test_an_exchange_is_no_attendance(
    server: QuickServer, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who begins to wait during one is there for its turn when that has ended."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        in_front, claim = bench.claim(), bench.claim()
        await theirs.queue(in_front)
        busy = await ours.queue(claim)
        (session,) = ours.store.sessions.values()  # type: ignore[attr-defined]
        send = ZooKeeperSession.send
        kept: list[Request] = []

        def keep_back(session: ZooKeeperSession, *requests: Request) -> None:
            monkeypatch.undo()
            kept.extend(requests)

        monkeypatch.setattr(ZooKeeperSession, "send", keep_back)
        exchanging = asyncio.create_task(ours.exchange(grant, claim))
        await until(lambda: bool(kept))
        waiting = asyncio.create_task(ours.wait(claim, busy, now() + ACROSS))
        await until(lambda: bool(session.watches))
        send(session, *kept)
        was_ours, answer = await exchanging
        assert was_ours
        assert isinstance(answer, Busy)
        entry = ours.store.entries[claim.owner]  # type: ignore[attr-defined]
        assert not entry.is_absent(now() + SOON)
        taken = await theirs.get(in_front)
        assert await theirs.release(taken)
        assert (await waiting or await ours.get(claim)).token > taken.token

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_who_is_called_and_does_not_come_is_skipped(
    server: QuickServer, namespace: str, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread or its event loop is busy, and its renewer goes on to refresh its place."""
    monkeypatch.setattr(zookeeper_entry, "GRACE_SECONDS", 0.2)
    unwatch = ZooKeeperSession.unwatch
    passed, got = threading.Event(), threading.Event()

    async def hold() -> None:
        opened = open_client(server.url, flavour, run_here, namespace=namespace, ttl=5)
        async with opened as locks, locks.lock("name", timeout=SOON):
            got.set()

    waiter = threading.Thread(target=lambda: asyncio.run(hold()))

    def late(session: ZooKeeperSession, path: str, signal: Callable[[], None]) -> None:
        if threading.current_thread() is waiter:
            passed.wait(SOON)
        unwatch(session, path, signal)

    monkeypatch.setattr(ZooKeeperSession, "unwatch", late)
    with (
        holdfast.connect(server.url, namespace=namespace, ttl=TTL) as first,
        holdfast.connect(server.url, namespace=namespace, ttl=TTL) as last,
        ThreadPoolExecutor(1) as pool,
    ):
        with first.lock("name"):
            waiter.start()
            wait_until("a waiter", lambda: len(first.inspect("name").waiters) == 1, SOON)
            behind = pool.submit(last.lock("name", timeout=SOON).acquire)
            wait_until("another", lambda: len(first.inspect("name").waiters) == 2, SOON)
        lease = behind.result(SOON)
        assert not got.is_set()
        passed.set()
        assert lease
        lease.release()
        assert got.wait(SOON)
        waiter.join(SOON)


# The rule itself, without a server.


def _grant() -> Grant:
    return Grant(claim_of(), 7)


def test_a_node_that_is_over_lets_nobody_in() -> None:
    """Whatever was seen before that; and it is for one to delete it."""
    node = ClaimNode("/name/node", 1, 7)
    assert node.end()
    assert not node.hold(_grant(), math.inf)
    assert node.grant is None
    assert not node.end()


def test_a_node_that_has_let_somebody_in_is_not_given_up() -> None:
    """Also if it was about to be: what is decided in between is looked at again."""
    node, grant, seen = ClaimNode("/name/node", 1, 7), _grant(), []

    def unless(state: NodeState) -> bool:
        seen.append(state.grant)
        if state.grant is None:
            assert node.hold(grant, 50.0)
        return state.grant is not None

    assert not node.end(unless)
    assert seen == [None, grant]
    assert node.hold(grant, 60.0)
    assert node.current().ends == 60.0
    assert node.end()


def test_a_node_that_is_given_up_is_not_renewed() -> None:
    """The end comes after what was decided last, however late that was noted."""
    node = ClaimNode("/name/node", 1, 7)
    first = node.state
    assert node.hold(_grant(), 50.0)
    assert node.end()
    node.state = first
    assert node.ended
    assert not node.hold(_grant(), 60.0)

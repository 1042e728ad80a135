"""The state of a claim's node: of several threads that change it at once, one wins.

The thread of the heartbeats ends nodes that are not kept. These tests force the rare case that it
does so in the moment in which the claim is granted.
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
from holdfast.stores.zookeeper import node as zookeeper_node
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
from stores.redis.helpers import blocking_and_asyncio, over, until
from stores.zookeeper import helpers
from stores.zookeeper.helpers import TTL, QuickServer, nodes_of

SOON = 60.0
server = helpers.server


@pytest.fixture
def end_node(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes the thread of the heartbeats end the node of its waiter, right after the arrival of the
    listing by which that waiter would be granted."""
    listed = ListingPrefetch._listed

    def prepare(store: Any) -> None:
        def listed_and_ended(prefetch: Any, request: Request) -> None:
            if prefetch._session not in store.sessions.values():
                listed(prefetch, request)
                return
            monkeypatch.undo()
            wait_end, prefetch._wait_end = prefetch._wait_end, threading.Event()
            listed(prefetch, request)
            (entry,) = store.entries.values()
            entry.refreshed = -math.inf
            store.clean_up(prefetch._session, now())
            wait_end.set()

        monkeypatch.setattr(ListingPrefetch, "_listed", listed_and_ended)

    return prepare


async def _wait(peer: Peer, claim: Claim) -> asyncio.Task[Grant | None]:
    """Starts a wait, and returns once its watch is set."""
    busy = await peer.queue(claim)
    waiting = asyncio.create_task(peer.wait(claim, busy, now() + ACROSS))
    (session,) = peer.store.sessions.values()  # type: ignore[attr-defined]
    await until(lambda: bool(session.watches))
    await peer.look(claim.name)  # executed after the request that sets the watch
    return waiting


@blocking_and_asyncio
def test_a_waiter_whose_node_ends_as_it_is_woken_is_not_granted(
    server: QuickServer, flavour: Flavour, kazoo: KazooClient, end_node: Callable[[Any], None]
) -> None:
    """The listing shows its node first, but it is about to be deleted: the next is granted."""

    async def body(bench: Bench) -> None:
        ours, theirs, others = bench.peer(), bench.peer(), bench.peer()
        held = await theirs.take(bench.claim())
        claim, behind = bench.claim(), bench.claim()
        end_node(ours.store)
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


async def _waiters(opened: Any, number: int) -> None:
    """Returns once so many claims wait."""
    async with asyncio.timeout(SOON):
        while len((await opened.inspect("name")).waiters) < number:
            pass


@blocking_and_asyncio
def test_a_client_holds_only_with_its_node(
    server: QuickServer, namespace: str, flavour: Flavour, end_node: Callable[[Any], None]
) -> None:
    """The same through the clients: the store shows the client that holds."""

    async def contend(workers: Workers) -> list[int]:
        all_opened = [
            open_client(server.url, flavour, workers.run, namespace=namespace, ttl=TTL)
            for _ in range(3)
        ]
        first, second, third = all_opened
        store: Any = getattr(second, "_inner", second)._engine.store
        end_node(store)
        order = []

        async def hold(number: int) -> None:
            opened = all_opened[number]
            async with opened.lock("name", timeout=SOON) as lease:
                order.append(number)
                # Executed after all earlier requests of its session.
                holders = (await opened.inspect("name")).holders
                assert [holder.token for holder in holders] == [lease.token]

        async with first, second, third:
            async with first.lock("name"):
                tasks = []
                for number in (1, 2):
                    tasks.append(asyncio.create_task(hold(number)))
                    await _waiters(first, number)
                (session,) = store.sessions.values()
                await until(lambda: bool(session.watches))
                await second.inspect("name")  # executed after the request that sets the watch
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
def test_an_exchange_is_no_presence(
    server: QuickServer, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of an exchange does not make an owner absent that has begun to wait during it."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        ahead, claim = bench.claim(), bench.claim()
        await theirs.queue(ahead)
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
        taken = await theirs.get(ahead)
        assert await theirs.release(taken)
        assert (await waiting or await ours.get(claim)).token > taken.token

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_woken_waiter_that_does_not_act_is_skipped(
    server: QuickServer, namespace: str, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread or event loop is busy, although its renewer still refreshes its node."""
    monkeypatch.setattr(zookeeper_node, "GRACE_SECONDS", 0.2)
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


# The rules of the state itself, without a server.


def _grant() -> Grant:
    return Grant(claim_of(), 7)


def test_an_ended_node_is_not_granted() -> None:
    """Only one caller ends it, which must delete it."""
    node = ClaimNode("/name/node", 1, 7)
    assert node.end()
    assert not node.hold(_grant(), math.inf)
    assert node.grant is None
    assert not node.end()


def test_a_granted_node_is_not_ended_as_unkept() -> None:
    """Even if the grant comes between the check and the end: the check is repeated."""
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


def test_an_ended_node_is_not_renewed() -> None:
    """Even if ``state`` still points to an earlier state."""
    node = ClaimNode("/name/node", 1, 7)
    first = node.state
    assert node.hold(_grant(), 50.0)
    assert node.end()
    node.state = first
    assert node.ended
    assert not node.hold(_grant(), 60.0)

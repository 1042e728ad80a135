"""A claim has one node, which is deleted when the claim ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, cast

import pytest
from kazoo.client import KazooClient

from holdfast.claim import Busy, Grant, Mode
from holdfast.core.contract import Settings, Waiting
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.zookeeper.backend import CONCURRENT_ATTEMPT_SECONDS
from holdfast.stores.zookeeper.client.packets import (
    ConnectionLost,
    Create,
    Delete,
    Exists,
    Multi,
    Request,
    Write,
)
from holdfast.stores.zookeeper.pending import PendingDelete
from holdfast.stores.zookeeper.queue import entry_prefix
from holdfast.stores.zookeeper.session import ZooKeeperSession
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from holdfast.url import open_store
from servers.process import wait_until
from stores.claims import claim_of
from stores.redis.helpers import blocking_and_asyncio, over, until
from stores.zookeeper import helpers
from stores.zookeeper.helpers import TTL, QuickServer, nodes_of

SOON = 60.0
server = helpers.server


@blocking_and_asyncio
def test_one_attempt_creates_the_node_of_a_claim(
    server: QuickServer, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second attempt does not create another node while the first one does: one of the two nodes
    would be deleted as a duplicate, even if it was granted."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        grant = await ours.take(bench.claim())
        ahead, next_waiter = bench.claim(), bench.claim()
        await theirs.queue(ahead)
        send = ZooKeeperSession.send
        kept: list[Request] = []

        def hold_back(session: ZooKeeperSession, *requests: Request) -> None:
            if isinstance(requests[0], Create):
                monkeypatch.undo()
                kept.extend(requests)
            else:
                send(session, *requests)

        monkeypatch.setattr(ZooKeeperSession, "send", hold_back)
        exchanging = asyncio.create_task(ours.exchange(grant, next_waiter))
        await until(lambda: bool(kept))
        assert await ours.queue(next_waiter) == Busy(0, CONCURRENT_ATTEMPT_SECONDS)
        (session,) = ours.store.sessions.values()  # type: ignore[attr-defined]
        send(session, *kept)
        was_ours, answer = await exchanging
        assert was_ours
        assert isinstance(answer, Busy)
        assert await ours.queue(next_waiter) == answer
        info = await theirs.look("name")
        assert (len(info.holders), len(info.waiters)) == (1, 1)

    over(server.url, flavour, body)


class HeldBack:
    """Holds back requests of some sessions until the test sends them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._send = ZooKeeperSession.send
        self._requests: dict[ZooKeeperSession, tuple[Request, ...]] = {}
        self._kinds: dict[ZooKeeperSession, type[Request]] = {}
        monkeypatch.setattr(
            ZooKeeperSession, "send", lambda session, *requests: self._sent(session, requests)
        )

    def next_of(self, peer: Peer, kind: type[Request]) -> ZooKeeperSession:
        """Holds back the next request of a kind in a peer's only session."""
        (session,) = peer.store.sessions.values()  # type: ignore[attr-defined]
        self._kinds[session] = kind
        return cast("ZooKeeperSession", session)

    def _sent(self, session: ZooKeeperSession, requests: tuple[Request, ...]) -> None:
        if isinstance(requests[0], self._kinds.get(session, NoneType)):
            del self._kinds[session]
            self._requests[session] = requests
        else:
            self._send(session, *requests)

    async def send(self, session: ZooKeeperSession) -> None:
        await until(lambda: session in self._requests)
        self._send(session, *self._requests[session])

    async def has(self, session: ZooKeeperSession) -> None:
        await until(lambda: session in self._requests)


@blocking_and_asyncio
def test_slots_taken_while_their_claim_is_revoked_are_deleted(
    server: QuickServer, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The revoking client has read no slots: they would stay taken as long as the session."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        for peer in (ours, theirs):
            await peer.release(await peer.take(bench.claim("another")))
        held_back = HeldBack(monkeypatch)
        claim, other = (bench.claim("name", Mode.SLOTS, limit=1) for _ in range(2))
        taking, ending = held_back.next_of(ours, Multi), held_back.next_of(theirs, Delete)
        attempt = asyncio.create_task(ours.attempt(claim))
        await held_back.has(taking)
        revoke = asyncio.create_task(theirs.revoke("name"))
        await held_back.has(ending)
        await held_back.send(taking)
        grant = await attempt
        assert isinstance(grant, Grant)
        await held_back.send(ending)
        assert await revoke == [grant.token]
        assert await ours.release(grant) is False
        assert (await theirs.get(other)).slots == (0,)

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_writing_how_many_wait_behind_keeps_the_slots(
    server: QuickServer, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots are in the same data, and may be taken just before the write."""

    async def body(bench: Bench) -> None:
        ours, theirs = bench.peer(), bench.peer()
        held = await theirs.take(bench.claim("name", Mode.SLOTS, limit=1))
        claim = bench.claim("name", Mode.SLOTS, limit=1)
        await ours.queue(claim)
        held_back = HeldBack(monkeypatch)
        writing = held_back.next_of(ours, Write)
        renewal = asyncio.create_task(ours.renew([], [Waiting(claim, 3)]))
        await held_back.has(writing)
        assert await theirs.release(held)
        grant = await ours.get(claim)
        await held_back.send(writing)
        assert (await renewal).forgotten == frozenset()
        (holder,) = (await theirs.look("name")).holders
        assert (holder.token, holder.slots) == (grant.token, (0,))

    over(server.url, flavour, body)


@pytest.fixture
def backend(server: QuickServer, namespace: str) -> Iterator[Any]:
    made = open_store(server.url, Settings(namespace=namespace)).backend(BlockingRuntime())
    yield made
    run_now(made.close())


def _lose(monkeypatch: pytest.MonkeyPatch, kind: type[Request]) -> list[Sequence[Request]]:
    """Loses the next request of a kind."""
    send = ZooKeeperSession.send
    lost: list[Sequence[Request]] = []

    def lose_one(session: ZooKeeperSession, *requests: Request) -> None:
        if not lost and isinstance(requests[0], kind):
            lost.append(requests)
            for request in requests:
                request.fail(ConnectionLost())
        else:
            send(session, *requests)

    monkeypatch.setattr(ZooKeeperSession, "send", lose_one)
    return lost


def test_a_lost_delete_is_retried(
    backend: Any, namespace: str, kazoo: KazooClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the claims behind it would wait until the session ends."""
    held = run_now(backend.attempt(claim_of(ttl=TTL), join=True))
    claim = claim_of(ttl=2)
    assert isinstance(run_now(backend.attempt(claim, join=True)), Busy)
    lost = _lose(monkeypatch, Delete)
    backend.store.entries[claim.owner].refreshed = -math.inf
    path = f"/{namespace}/locks/name"
    wait_until("its end", lambda: len(nodes_of(kazoo, path)) == 1, SOON)
    assert lost
    assert run_now(backend.release(held))


def test_an_ended_node_is_not_adopted(
    backend: Any, namespace: str, kazoo: KazooClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its delete may still be pending."""
    held = run_now(backend.attempt(claim_of(ttl=TTL), join=True))
    claim = claim_of(ttl=TTL)
    assert isinstance(run_now(backend.attempt(claim, join=True)), Busy)
    entry = backend.store.entries[claim.owner]
    entry.refreshed, ended = -math.inf, entry.node.path
    (session,) = backend.store.sessions.values()
    _lose(monkeypatch, Delete)
    backend.store.clean_up(session, now())
    monkeypatch.undo()
    _lose(monkeypatch, Create)
    with pytest.raises(BackendUnavailable):
        run_now(backend.attempt(claim, join=True))
    assert ended.rpartition("/")[2] in nodes_of(kazoo, f"/{namespace}/locks/name")
    run_now(backend.attempt(claim, join=True))
    assert entry.node.path != ended
    assert run_now(backend.release(held))
    assert isinstance(run_now(backend.attempt(claim, join=True)), Grant)


def test_a_node_of_another_session_is_not_adopted(
    backend: Any, namespace: str, kazoo: KazooClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a lost reply to a create, and the end of its session: a node that the create has made
    ends with that session."""
    assert isinstance(run_now(backend.attempt(claim_of("warm", ttl=TTL), join=True)), Grant)
    claim = claim_of(ttl=TTL)
    _lose(monkeypatch, Create)
    with pytest.raises(BackendUnavailable):
        run_now(backend.attempt(claim, join=True))
    node = f"/{namespace}/locks/name/{entry_prefix(claim)}"
    kazoo.create(node, b"20 0  0\n[]", ephemeral=True, sequence=True, makepath=True)
    grants: list[Grant] = []

    def granted() -> bool:
        answer = run_now(backend.attempt(claim, join=True))
        grants.extend([answer] if isinstance(answer, Grant) else [])
        return bool(grants)

    wait_until("a grant", granted, SOON)
    (session,) = backend.store.sessions.values()
    assert kazoo.exists(grants[0].ref[2]).ephemeralOwner == session.id
    assert run_now(backend.release(grants[0]))


def test_a_new_attempt_cancels_the_pending_delete(backend: Any) -> None:
    """The thread of the heartbeats may be about to delete all nodes of the owner."""
    claim = claim_of(ttl=TTL)
    assert isinstance(run_now(backend.attempt(claim, join=True)), Grant)
    run_now(backend.abandon(claim))
    (session,) = backend.store.sessions.values()
    pending = backend.store.pending_deletes.add(PendingDelete(TTL, claim, 0.0))
    grant = run_now(backend.attempt(claim, join=True))
    backend.store.pending_deletes.retry(session, pending)
    run_now(backend.request(session, Exists("/")))  # after the listing, then after the read
    run_now(backend.request(session, Exists("/")))
    renewal = run_now(backend.renew([grant], [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})

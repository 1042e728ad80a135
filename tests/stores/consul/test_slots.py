"""Slots on Consul are keys of their own: the end of a claim deletes its slots, and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.claim import Claim, Mode
from holdfast.stores.consul.agent import TXN
from holdfast.stores.consul.session import DESTROY
from holdfast.testing import Flavour
from servers.consul import ConsulServer
from servers.registry import Servers
from stores.claims import claim_of
from stores.http_peer import Peer, peers
from stores.redis.helpers import blocking_and_asyncio

SOON = 60.0


@pytest.fixture
def peer(servers: Servers, namespace: str) -> Iterator[Callable[[Flavour], Peer]]:
    with peers(servers.of(ConsulServer).url, namespace) as make:
        yield make


def _slots(limit: int = 1) -> Claim:
    return claim_of("name", Mode.SLOTS, 1, limit)


def _before_write(peer: Peer, number: int, step: Callable[[], object]) -> None:
    """Calls ``step`` right before the peer's writing transaction of that number, from now on."""
    ask, left = peer.post.ask, [number]

    async def asked(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
        left[0] -= line == TXN
        if line == TXN and left[0] == 0:
            step()
        return await ask(line, body, until)

    peer.post.ask = asked  # type: ignore[method-assign]


@blocking_and_asyncio
def test_slots_taken_while_their_claim_is_revoked_end_with_it(
    peer: Callable[[Flavour], Peer], flavour: Flavour
) -> None:
    """The revoking client has not seen the slots. If they stayed, no other claim could have them
    while the session lives."""
    ours, theirs = peer(flavour), peer(flavour)
    for one in (ours, theirs):
        one.run(one.backend.release(one.take(claim_of("another"))))
    seen, taken = threading.Event(), threading.Event()

    def pause() -> None:
        seen.set()
        assert taken.wait(SOON)

    with ThreadPoolExecutor(1) as pool:
        breaking = []

        def see() -> None:
            breaking.append(pool.submit(theirs.run, theirs.backend.revoke("name")))
            assert seen.wait(SOON)

        _before_write(theirs, 1, pause)
        _before_write(ours, 2, see)  # the first one joins the queue
        grant = ours.take(_slots())
        taken.set()
        assert breaking[0].result(SOON) == [grant.token]
    assert ours.run(ours.backend.release(grant)) is False
    assert theirs.take(_slots()).slots == (0,)


@blocking_and_asyncio
def test_abandon_keeps_a_slot_that_another_claim_has_taken(
    peer: Callable[[Flavour], Peer], flavour: Flavour
) -> None:
    """The slot was ours when it was read; then its session ended, and another claim took it."""
    ours, theirs, others = (peer(flavour) for _ in range(3))
    claim = _slots(2)
    (slot,) = ours.take(claim).slots
    (session,) = ours.store.sessions.all()
    taken: list[tuple[int, ...]] = []

    def take() -> None:
        with ThreadPoolExecutor(1) as pool:
            line = DESTROY + session.id.encode()
            pool.submit(theirs.run, theirs.backend.agent.ask(bool, line)).result(SOON)
            taken.append(pool.submit(theirs.take, _slots(2)).result(SOON).slots)

    _before_write(ours, 2, take)  # the first one deletes the entry
    ours.run(ours.backend.abandon(claim))
    assert taken == [(slot,)]
    assert others.take(_slots(2)).slots == (1 - slot,)

"""Advisory modes: the server grants while a client reads nothing, and the hold may be broken
before its answer is read."""

from __future__ import annotations

import secrets

import pytest

from holdfast.claim import Busy
from holdfast.core.contract import Settings
from holdfast.io.clock import now
from holdfast.testing import Flavour, loops
from holdfast.testing.contract.bench import SOON, Peer
from holdfast.testing.workers import Workers
from holdfast.url import open_store
from stores import sql_helpers
from stores.claims import claim_of
from stores.sql_helpers import Store

store = sql_helpers.store


async def _revoked(peer: Peer) -> list[int]:
    """Breaks the hold of the waiter, as soon as the server has granted it."""
    deadline = now() + SOON
    while not (broken := await peer.revoke("name")):
        assert now() < deadline, "the waiter was not granted the name"
    return broken


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_hold_that_was_broken_unread_is_not_entered(store: Store, flavour: Flavour) -> None:
    """The waiter's own socket shows that its session has ended: it waits behind the next holder,
    instead of entering beside it."""
    settings = Settings(namespace=f"t{secrets.token_hex(6)}")
    workers = Workers()

    async def body() -> None:
        url = store.url("advisory")
        ours, theirs, third = (Peer(open_store(url, settings), flavour, workers) for _ in range(3))
        grant = await ours.take(claim_of())
        waiting = claim_of()
        await theirs.queue(waiting)
        assert await ours.release(grant) is True
        broken = await _revoked(third)
        next_one = await third.get(claim_of())
        assert [next_one.token] > broken
        answer = await theirs.attempt(waiting)
        assert isinstance(answer, Busy)
        assert await third.release(next_one) is True
        assert (await theirs.get(waiting)).token > next_one.token
        for peer in (ours, theirs, third):
            await peer.close()

    try:
        loops.run(body())
    finally:
        workers.close()

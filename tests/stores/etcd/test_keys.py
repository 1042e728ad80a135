"""Keys on etcd are recycled, but never while a request of the earlier claim may still arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores.etcd.calls import TXN
from holdfast.stores.etcd.keys import KeyPool
from stores.claims import claim_of
from stores.etcd import helpers
from stores.http_peer import Peer

SOON = 20.0
LATER = 3 * SOON
server, peer = helpers.server, helpers.peer


def _release(one: Peer, grant: Grant) -> str:
    """Releases a hold and returns its key."""
    assert run_now(one.backend.release(grant))
    key: str = grant.ref.key
    return key


@pytest.mark.parametrize(("mode", "limit"), [(Mode.EXCLUSIVE, 0), (Mode.SLOTS, 1)])
def test_holds_of_a_client_use_one_key(peer: Callable[[], Peer], mode: Mode, limit: int) -> None:
    """However often a name is acquired or refused, with or without joining the queue."""
    ours, theirs = peer(), peer()
    keys, tokens = set(), []
    for _ in range(5):
        grant = ours.take(claim_of("name", mode, limit=limit))
        waiting = claim_of("name", mode, limit=limit)
        for join in (False, True):
            claim = waiting if join else claim_of("name", mode, limit=limit)
            assert isinstance(theirs.attempt(claim, join=join), Busy)
        keys.add(_release(ours, grant))
        second = theirs.take(waiting)
        keys.add(_release(theirs, second))
        tokens += [grant.token, second.token]
    assert len(keys) == 2
    assert tokens == sorted(set(tokens))


def test_a_claim_whose_request_may_still_arrive_keeps_its_key(peer: Callable[[], Peer]) -> None:
    one = peer()
    used = _release(one, one.take(claim_of()))
    lost = claim_of()
    one.post.lose = b"txn"
    with pytest.raises(BackendUnavailable):
        one.attempt(lost)
    run_now(one.backend.abandon(lost))
    grant = one.take(claim_of())
    assert grant.ref.key != used
    assert one.post.lost is not None
    run_now(one.post.http.ask(*one.post.lost))  # the request arrives late
    assert run_now(one.backend.renew([grant], [], until=now() + SOON)).lost == {}
    run_now(one.backend.abandon(lost))  # a second time
    assert _release(one, grant)


def _lose(one: Peer, claim: Claim, *, join: bool) -> None:
    one.post.lose = b"txn"
    with pytest.raises(BackendUnavailable):
        one.attempt(claim, join=join)


def test_a_hold_with_an_unanswered_request_keeps_its_key(peer: Callable[[], Peer]) -> None:
    """A second request was granted, and the first one may still arrive."""
    one = peer()
    one.take(claim_of("warm"))
    claim = claim_of()
    _lose(one, claim, join=True)
    used = _release(one, one.take(claim))
    assert one.take(claim_of()).ref.key != used


def test_a_refused_claim_with_an_unanswered_request_keeps_its_key(
    peer: Callable[[], Peer],
) -> None:
    """The claim has no entry; but its earlier request may still create one."""
    ours, theirs = peer(), peer()
    ours.take(claim_of("warm"))
    held, claim = theirs.take(claim_of()), claim_of()
    _lose(ours, claim, join=False)
    used = ours.store.key(claim).decode()
    assert isinstance(ours.attempt(claim, join=False), Busy)
    assert _release(theirs, held)
    assert ours.take(claim_of()).ref.key != used


def test_undoing_an_ended_claim_changes_nothing(peer: Callable[[], Peer]) -> None:
    """An interrupt may come right after the reply to a release."""
    one = peer()
    first = one.take(claim_of())
    used = _release(one, first)
    second = one.take(claim_of())
    assert second.ref.key == used
    run_now(one.backend.abandon(first.claim))
    assert not run_now(one.backend.release(first))
    assert list(run_now(one.backend.renew([first], [], until=now() + SOON)).lost)
    assert _release(one, second) == used


@pytest.mark.parametrize(("mode", "limit"), [(Mode.EXCLUSIVE, 0), (Mode.SLOTS, 1)])
def test_a_recycled_key_misleads_no_waiter(
    peer: Callable[[], Peer], mode: Mode, limit: int
) -> None:
    """The claim ahead ended, and its key is behind the waiter when the wait starts."""
    ours, theirs = peer(), peer()
    held = ours.take(claim_of("name", mode, limit=limit))
    waiting = claim_of("name", mode, limit=limit)
    busy = theirs.attempt(waiting)
    assert isinstance(busy, Busy)
    used = _release(ours, held)
    again = claim_of("name", mode, limit=limit)
    assert isinstance(ours.attempt(again), Busy)
    assert ours.store.key(again).decode() == used
    wait = theirs.backend.wait(waiting, busy, now() + LATER)
    thread = threading.Thread(target=run_now, args=(wait,))
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()
    assert isinstance(theirs.attempt(waiting), Grant)


def test_a_revoke_does_not_end_the_next_hold_with_the_same_key(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hold ends while it is being revoked, and its key is recycled."""
    ours, theirs = peer(), peer()
    grants = [ours.take(claim_of())]
    ask = theirs.post.ask

    async def late(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
        if line == TXN.path and len(grants) == 1:
            _release(ours, grants[0])
            grants.append(ours.take(claim_of()))
        return await ask(line, body, until)

    monkeypatch.setattr(theirs.post, "ask", late)
    assert run_now(theirs.backend.revoke("name")) == []
    assert grants[0].ref.key == grants[1].ref.key
    assert _release(ours, grants[1])


def test_a_pinned_key_is_not_recycled() -> None:
    """A request on behalf of a claim may outlast it."""
    pool, first, second, third = KeyPool(), claim_of(), claim_of(), claim_of()
    key_id = pool.allocate(first)
    pool.pin(first)
    pool.recycle(first)
    assert pool.allocate(second) != key_id
    assert pool.of(first) == key_id  # for a second undo
    key_id = pool.allocate(second)
    pool.pin(second)
    pool.unpin(second)
    pool.recycle(second)
    assert pool.allocate(third) == key_id
    assert pool.of(second) != key_id


class Interleaved(dict[str, str]):
    """Runs a function right after the first access."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then: Callable[[], None] | None = then

    def _looked(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        self._looked()
        return found

    def pop(self, key: str, default: Any = None) -> Any:
        found = super().pop(key, default)
        self._looked()
        return found


@pytest.mark.parametrize("first", ["recycle", "quarantine"])
def test_a_key_that_two_threads_end_at_once_is_recycled_or_quarantined(first: str) -> None:
    """Never both: a second undo of the claim would delete another claim's entry."""
    pool, claim, other = KeyPool(), claim_of(), claim_of()
    key_id = pool.allocate(claim)
    second = {"recycle": pool.quarantine, "quarantine": pool.recycle}[first]
    pool._allocated = Interleaved(lambda: second(claim))
    dict.__setitem__(pool._allocated, claim.owner, key_id)
    getattr(pool, first)(claim)
    assert (pool.allocate(other) == key_id) != (pool.of(claim) == key_id)

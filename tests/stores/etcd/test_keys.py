"""Keys on etcd are used again, but never while anything of the claim before may still arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.http import Reply
from holdfast.stores.etcd.keys import KeyPool
from stores.claims import claim_of
from stores.etcd import helpers
from stores.http_peer import Peer

SOON = 20.0
LATER = 3 * SOON
server, peer = helpers.server, helpers.peer


def _release(one: Peer, grant: Grant) -> str:
    """Releases a hold and says which key it had."""
    assert run_now(one.backend.release(grant))
    key: str = grant.ref.key
    return key


@pytest.mark.parametrize(("mode", "limit"), [(Mode.EXCLUSIVE, 0), (Mode.SLOTS, 1)])
def test_holds_of_a_client_use_one_key(peer: Callable[[], Peer], mode: Mode, limit: int) -> None:
    """However often a name is taken, or asked for in vain, in line or not."""
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


def test_what_may_still_arrive_keeps_its_key(peer: Callable[[], Peer]) -> None:
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
    run_now(one.post.http.ask(*one.post.lost))  # it arrives after all
    assert run_now(one.backend.renew([grant], [], until=now() + SOON)).lost == {}
    run_now(one.backend.abandon(lost))  # once more
    assert _release(one, grant)


def _lose(one: Peer, claim: Claim, *, join: bool) -> None:
    one.post.lose = b"txn"
    with pytest.raises(BackendUnavailable):
        one.attempt(claim, join=join)


def test_a_hold_with_an_unanswered_request_keeps_its_key(peer: Callable[[], Peer]) -> None:
    """It was granted by a second request, and the first one is still on its way."""
    one = peer()
    one.take(claim_of("warm"))
    claim = claim_of()
    _lose(one, claim, join=True)
    used = _release(one, one.take(claim))
    assert one.take(claim_of()).ref.key != used


def test_who_was_refused_with_an_unanswered_request_keeps_its_key(
    peer: Callable[[], Peer],
) -> None:
    """It stands nowhere; but the request before may still put it there."""
    ours, theirs = peer(), peer()
    ours.take(claim_of("warm"))
    held, claim = theirs.take(claim_of()), claim_of()
    _lose(ours, claim, join=False)
    used = ours.store.key(claim).decode()
    assert isinstance(ours.attempt(claim, join=False), Busy)
    assert _release(theirs, held)
    assert ours.take(claim_of()).ref.key != used


def test_who_is_undone_after_its_end_harms_nobody(peer: Callable[[], Peer]) -> None:
    """An interrupt may come right behind the answer to a release."""
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
def test_a_key_that_is_used_again_fools_no_waiter(
    peer: Callable[[], Peer], mode: Mode, limit: int
) -> None:
    """The one in front has left, and stands behind it when the wait begins."""
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


def test_a_hold_is_not_broken_for_one_before_it(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who breaks a hold that ends in the same moment does not meet the next with its key."""
    ours, theirs = peer(), peer()
    grants = [ours.take(claim_of())]
    ask = theirs.post.ask

    async def late(words: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        if b"txn" in words and len(grants) == 1:
            _release(ours, grants[0])
            grants.append(ours.take(claim_of()))
        return await ask(words, body, until)

    monkeypatch.setattr(theirs.post, "ask", late)
    assert run_now(theirs.backend.revoke("name")) == []
    assert grants[0].ref.key == grants[1].ref.key
    assert _release(ours, grants[1])


def test_a_tag_is_lent_until_it_is_given_back() -> None:
    """What is asked on behalf of a claim may outlast it."""
    pool, first, second, third = KeyPool(), claim_of(), claim_of(), claim_of()
    tag = pool.allocate(first)
    pool.pin(first)
    pool.recycle(first)
    assert pool.allocate(second) != tag
    assert pool.of(first) == tag  # for whoever undoes it
    tag = pool.allocate(second)
    pool.pin(second)
    pool.unpin(second)
    pool.recycle(second)
    assert pool.allocate(third) == tag
    assert pool.of(second) != tag


class Meddled(dict[str, str]):
    """Has something done right after the first look at it."""

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
def test_a_tag_that_two_end_at_a_time_is_nobody_s_or_another_s(first: str) -> None:
    """Never both: whoever undoes the claim once more would meet another's entry."""
    pool, claim, other = KeyPool(), claim_of(), claim_of()
    tag = pool.allocate(claim)
    second = {"recycle": pool.quarantine, "quarantine": pool.recycle}[first]
    pool._allocated = Meddled(lambda: second(claim))
    dict.__setitem__(pool._allocated, claim.owner, tag)
    getattr(pool, first)(claim)
    assert (pool.allocate(other) == tag) != (pool.of(claim) == tag)

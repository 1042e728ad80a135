"""What waiting in a queue of etcd costs: the same for each waiter, however long the queue is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.acquire import _look
from holdfast.core.drive import run_now
from stores.claims import claim_of
from stores.etcd import helpers
from stores.http_peer import Peer

server, peer = helpers.server, helpers.peer
SHORT, LONG = 10, 100
DIGITS = 64
"""Some numbers have more digits in a long queue."""


class Waiter(NamedTuple):
    one: Peer
    claim: Claim
    busy: Busy


def _claim(name: str, mode: Mode) -> Claim:
    return claim_of(name, mode, limit=3 if mode is Mode.SLOTS else 0)


def _queue(make: Callable[[], Peer], name: str, mode: Mode, count: int) -> list[Waiter]:
    """Waiters of one name, each with a client of its own, behind a hold; readers behind a writer
    that waits."""
    if mode is Mode.SLOTS:
        make().take(claim_of(name, mode, 3, 3))
    else:
        make().take(claim_of(name))
    waiters = []
    for number in range(count):
        kind = Mode.EXCLUSIVE if mode is Mode.SHARED and number < 2 else mode
        one, claim = make(), _claim(name, kind)
        answer = one.attempt(claim)
        assert isinstance(answer, Busy)
        waiters.append(Waiter(one, claim, answer))
    return waiters


def _recheck(waiter: Waiter) -> tuple[int, int]:
    """Requests and bytes of one re-check."""
    one, claim, busy = waiter
    one.post.asked.clear()
    one.post.read = 0
    again = one.attempt(claim)
    assert isinstance(again, Busy)
    assert again.place == busy.place
    assert again.ref[0] == busy.ref[0]
    run_now(one.backend.waits._changed(claim, again.ref[0], again.ref[1]))
    return len(one.post.asked), one.post.read


@pytest.mark.parametrize("mode", list(Mode))
def test_a_recheck_costs_the_same_in_a_queue_of_any_length(
    peer: Callable[[], Peer], mode: Mode
) -> None:
    short = [_recheck(waiter) for waiter in _queue(peer, "short", mode, SHORT)[4:]]
    long = [_recheck(waiter) for waiter in _queue(peer, "long", mode, LONG)[4:]]
    assert {requests for requests, _ in short + long} == {2}
    most = max(read for _, read in short)
    assert max(read for _, read in long) <= most + DIGITS


@pytest.mark.parametrize("mode", list(Mode))
def test_naming_the_holder_costs_the_same_in_a_queue_of_any_length(
    peer: Callable[[], Peer], mode: Mode
) -> None:
    """As every timeout does, and every waiter once, after ten seconds."""

    def cost(name: str, count: int) -> tuple[int, int]:
        one, claim, _ = _queue(peer, name, mode, count)[-1]
        one.post.asked.clear()
        one.post.read = 0
        engine: Any = SimpleNamespace(backend=one.backend)
        found = run_now(_look(engine, claim))
        assert found is not None
        assert len(found.holders) == 1
        return len(one.post.asked), one.post.read

    few, many = cost("short", SHORT), cost("long", LONG)
    assert many[0] == few[0]
    assert many[1] <= few[1] + 10 * DIGITS


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SLOTS])
def test_a_hold_costs_the_same_while_a_queue_of_any_length_is_served(
    peer: Callable[[], Peer], mode: Mode
) -> None:
    def requests(name: str, count: int) -> float:
        holder, *waiters = _queue(peer, name, mode, count)
        first = run_now(holder.one.backend.revoke(name))
        assert first
        total = 0
        for one, claim, _ in [holder, *waiters]:
            one.post.asked.clear()
            grant = one.attempt(claim)
            assert isinstance(grant, Grant)
            assert run_now(one.backend.release(grant))
            total += len(one.post.asked)
        return total / count

    few, many = requests("short", SHORT), requests("long", LONG)
    assert many <= few + 0.5


def test_a_waiter_reads_the_whole_queue_only_if_it_may_be_served(peer: Callable[[], Peer]) -> None:
    """A second claim of slots that fits is granted slots that no holder behind it has."""
    holder, second, third = peer(), peer(), peer()
    grant = holder.take(claim_of("slots", Mode.SLOTS, 3, 3))
    late, later = _claim("slots", Mode.SLOTS), _claim("slots", Mode.SLOTS)
    assert isinstance(second.attempt(late), Busy)
    assert isinstance(third.attempt(later), Busy)
    assert run_now(holder.backend.release(grant))
    ahead, behind = third.attempt(later), second.attempt(late)
    assert isinstance(ahead, Grant)
    assert isinstance(behind, Grant)
    assert not set(ahead.slots) & set(behind.slots)

"""A take-over needs a majority; without one the hold is lost, and nothing of it is left."""

from __future__ import annotations

import time

import pytest

import holdfast
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, LockLost
from stores.redlock.helpers import KEY, Nodes, five, held_by, three

__all__ = ["five", "three"]


def _handed_over(url: str, ttl: float = 30) -> tuple[holdfast.Locks, str, int]:
    locks = holdfast.connect(url)
    lease = locks.lock("name", ttl=ttl).acquire()
    assert lease is not None
    return locks, lease.hand_over(), lease.token


def test_a_minority_may_be_down(three: Nodes) -> None:
    ours, text, token = _handed_over(three.url)
    with ours, holdfast.connect(three.url) as theirs:
        three.nodes[0].kill()
        taken = theirs.take_over(text)
        assert taken.token > token
        assert [held_by(node) for node in three.nodes[1:]] == [True, True]
        taken.extend()
        assert taken.release() is True
        assert [held_by(node) for node in three.nodes[1:]] == [False, False]


def test_a_minority_of_votes_is_undone(five: Nodes) -> None:
    """Three of five nodes no longer have the hold: the other two must not keep it for a taker."""
    ours, text, _ = _handed_over(five.url)
    with ours, holdfast.connect(five.url) as theirs:
        for node in five.nodes[:3]:
            node.ask("DEL", KEY)
        with pytest.raises(LockLost):
            theirs.take_over(text)
        time.sleep(0.2)
        assert not any(map(held_by, five.nodes))
        lease = theirs.lock("name").acquire(timeout=5)
        assert lease is not None
        lease.release()


def test_without_a_majority_of_answers_it_is_unknown(three: Nodes) -> None:
    """No answer is no loss: it is tried again within the timeout, and then undone."""
    ours, text, _ = _handed_over(three.url)
    with ours, holdfast.connect(three.url) as theirs:
        for node in three.nodes[:2]:
            node.kill()
        with pytest.raises(BackendUnavailable):
            theirs.take_over(text, timeout=1)


def test_counters_ahead_of_the_clock_are_passed(three: Nodes) -> None:
    """A node whose counter is above the proposed token asks for a higher one."""
    ours, text, token = _handed_over(three.url)
    with ours, holdfast.connect(three.url) as theirs:
        ahead = token + 3_600_000_000
        for node in three.nodes[:2]:
            node.ask("HSET", KEY, "c", str(ahead))
        taken = theirs.take_over(text)
        assert taken.token > ahead
        assert taken.release() is True


def test_a_late_renewal_of_a_reader_restores_nothing(three: Nodes) -> None:
    """The old owner is remembered as a reader that was released."""
    with holdfast.connect(three.url) as ours, holdfast.connect(three.url) as theirs:
        lease = ours.rwlock("name").read().acquire()
        assert lease is not None
        grant = lease._hold.grant
        taken = theirs.take_over(lease.hand_over())
        backend = ours._renewer_thread.renewer.backend
        renewal = run_now(backend.renew([grant], [], until=ours._engine.runtime.now() + 5))
        assert set(renewal.lost) == {grant.claim.owner}
        assert len(theirs.inspect("name").holders) == 1
        assert taken.release() is True
        assert not theirs.inspect("name").holders

"""Waiters behind waiters on etcd: granted directly by a release, with a watch as the fallback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core import ordered
from holdfast.core.contract import DIRECT_GRANT_SECONDS
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.wakeups import EVERYBODY
from holdfast.stores.etcd import messages, requests, wakeups
from holdfast.stores.etcd.calls import DELETE
from holdfast.stores.etcd.wakeups import WatchTable
from stores.claims import claim_of
from stores.etcd import helpers
from stores.http_peer import Peer

SOON = 20.0
LATER = 3 * SOON
server, peer = helpers.server, helpers.peer


def _busy(one: Peer, claim: Claim) -> Busy:
    answer = one.attempt(claim)
    assert isinstance(answer, Busy)
    return answer


def _listening(one: Peer) -> None:
    """Opens the peer's subscription and waits until etcd has confirmed it: no wake-up of a later
    attempt can come too early."""
    wakeup_key = one.store.names.wakeup_key
    session = one.store.sessions.all()[0].id
    watches: Any = one.backend.waits.watches
    keys = requests.only(wakeup_key(session))
    watch = run_now(watches.subscribe(session, keys, [session], now() + SOON))
    deadline = now() + SOON
    while watch.start_revision is None and now() < deadline:
        run_now(watches.woken("no owner", now() + 0.05))


class Waiting(threading.Thread):
    """The wait of one claim in a thread, and its result."""

    def __init__(self, one: Peer, claim: Claim, busy: Busy) -> None:
        super().__init__()
        self._work = one.backend.wait(claim, busy, now() + LATER)
        self.grant: Grant | None = None
        self.start()

    def run(self) -> None:
        self.grant = run_now(self._work)

    def ended(self) -> bool:
        self.join(SOON)
        return not self.is_alive()


class Queue:
    """A holder, a waiter, and a last waiter behind that one, each in a client of its own."""

    def __init__(self, peer: Callable[[], Peer], name: str = "name") -> None:
        self.first, self.second, self.third = peer(), peer(), peer()
        for one in (self.second, self.third):
            run_now(one.backend.release(one.take(claim_of("warm"))))
            _listening(one)
        self.held = self.first.take(claim_of(name))
        self.waiting, self.last = claim_of(name), claim_of(name)
        _busy(self.second, self.waiting)
        self.busy = _busy(self.third, self.last)

    def wait(self) -> Waiting:
        """Starts the last waiter's wait."""
        return Waiting(self.third, self.last, self.busy)

    def advance(self) -> Grant:
        """The first claim is released and the second one takes the name."""
        run_now(self.first.backend.release(self.held))
        return self.second.take(self.waiting)

    def direct_grant(self) -> Grant:
        """The grant that the second claim's release gives to the last waiter."""
        waiting = self.wait()
        run_now(self.second.backend.release(self.advance()))
        assert waiting.ended()
        assert waiting.grant is not None
        return waiting.grant


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter relies on the wake-up for the whole test."""
    monkeypatch.setattr(wakeups, "WAKEUP_TRUST_SECONDS", 2 * SOON)


@pytest.mark.usefixtures("no_fallback")
def test_a_release_grants_directly(peer: Callable[[], Peer]) -> None:
    """One request releases and grants; another one, which writes nothing, confirms it to the new
    holder."""
    queue = Queue(peer)
    assert queue.busy.ref[2]
    queue.third.post.asked.clear()
    waiting = queue.wait()
    grant = queue.advance()
    queue.second.post.asked.clear()
    assert run_now(queue.second.backend.release(grant))
    assert len(queue.second.post.asked) == 1
    assert waiting.ended()
    assert len(queue.third.post.asked) == 1
    assert waiting.grant is not None
    assert waiting.grant.token > grant.token
    assert waiting.grant.seconds == DIRECT_GRANT_SECONDS
    holder = run_now(queue.first.backend.look("name")).holders[0]
    assert holder.token == waiting.grant.token


@pytest.mark.usefixtures("no_fallback")
def test_the_first_renewal_confirms_a_direct_grant(peer: Callable[[], Peer]) -> None:
    """It writes the entry. Later renewals write nothing."""
    queue = Queue(peer)
    granted = queue.direct_grant()
    for count in (4, 3):
        queue.third.post.asked.clear()
        renewal = run_now(queue.third.backend.renew([granted], [], until=now() + SOON))
        assert (renewal.lost, renewal.unknown) == ({}, {})
        assert len(queue.third.post.asked) == count
    behind = claim_of()
    busy = _busy(queue.first, behind)
    assert busy.retry_seconds is None  # no client will skip it
    assert run_now(queue.third.backend.release(granted))
    assert queue.first.take(behind).token > granted.token


@pytest.mark.usefixtures("no_fallback")
def test_a_late_reply_does_not_undo_a_direct_grant(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to an attempt that another thread sent on the waiter's behalf, before the direct
    grant."""
    queue = Queue(peer)
    answered, late = threading.Event(), threading.Event()
    ask = queue.third.post.ask

    async def held_back(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
        reply = await ask(line, body, until)
        if threading.current_thread() is asking:
            answered.set()
            late.wait(LATER)
        return reply

    monkeypatch.setattr(queue.third.post, "ask", held_back)
    asking = threading.Thread(target=queue.third.attempt, args=(queue.last,))
    asking.start()
    assert answered.wait(SOON)
    granted = queue.direct_grant()
    late.set()
    asking.join(SOON)
    renewal = run_now(queue.third.backend.renew([granted], [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert _busy(queue.first, claim_of()).retry_seconds is None  # no client will skip it


@pytest.mark.usefixtures("no_fallback")
def test_all_direct_grants_are_confirmed_in_one_request(peer: Callable[[], Peer]) -> None:
    """Direct grants are short, and a slow store must not confirm them one after the other."""
    peers = [peer() for _ in range(3)]
    queues = (Queue(partial(next, iter(peers)), str(number)) for number in range(5))
    granted = [queue.direct_grant() for queue in queues]
    last = peers[-1]
    last.post.asked.clear()
    renewal = run_now(last.backend.renew(granted, [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert len(last.post.asked) == 4


def test_a_release_succeeds_although_the_wake_up_fails(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release was answered; the next waiter finds out by itself in a moment."""
    queue = Queue(peer)
    grant = queue.advance()
    run_now(queue.third.backend.abandon(queue.last))  # so that it wakes another waiter instead
    behind = claim_of()
    _busy(queue.first, behind)
    post = queue.second.post
    ask = post.ask

    async def all_but_the_wake_up(
        line: bytes, body: bytes = b"", until: float | None = None
    ) -> Any:
        if len(post.asked) == 2:  # the direct grant failed, and the entry is deleted
            raise BackendUnavailable("cut")
        return await ask(line, body, until)

    post.asked.clear()
    monkeypatch.setattr(post, "ask", all_but_the_wake_up)
    assert run_now(queue.second.backend.release(grant))
    assert queue.first.take(behind).token > grant.token


@pytest.mark.usefixtures("no_fallback")
def test_an_unconfirmed_direct_grant_is_skipped(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry is deleted after the grace, and its renewal reports the loss."""
    queue = Queue(peer)
    granted = queue.direct_grant()
    behind = claim_of()
    assert _busy(queue.first, behind).retry_seconds is not None
    monkeypatch.setattr(ordered, "DIRECT_GRANT_SECONDS", 0.0)
    taken = queue.first.take(behind)
    assert taken.token > granted.token
    renewal = run_now(queue.third.backend.renew([granted], [], until=now() + SOON))
    assert list(renewal.lost) == [granted.claim.owner]


@pytest.mark.usefixtures("no_fallback")
def test_a_broken_hold_grants_nothing_directly(peer: Callable[[], Peer]) -> None:
    """Its late release must not grant the name to the next waiter while another client holds it."""
    queue = Queue(peer)
    grant = queue.advance()
    assert run_now(queue.first.backend.revoke("name"))
    taken = queue.third.take(queue.last)
    behind = claim_of()
    _busy(queue.first, behind)
    assert not run_now(queue.second.backend.release(grant))
    tokens = [each.token for each in run_now(queue.first.backend.look("name")).holders]
    assert tokens == [taken.token]
    assert run_now(queue.third.backend.renew([taken], [], until=now() + SOON)).lost == {}


@pytest.mark.usefixtures("no_fallback")
def test_a_direct_grant_of_another_lease_is_not_taken(peer: Callable[[], Peer]) -> None:
    """Its time would be counted by a lease that the entry is not bound to."""
    queue = Queue(peer)
    run_now(queue.second.backend.release(queue.advance()))
    waiter = queue.third
    assert run_now(waiter.backend._direct_grant(queue.last, now() + SOON)) is not None
    waiter.store.sessions.ended(waiter.store.sessions.current(queue.last.ttl).id)
    assert run_now(waiter.backend.leases.session(queue.last.ttl))
    assert run_now(waiter.backend._direct_grant(queue.last, now() + SOON)) is None
    taken = waiter.take(queue.last)  # its own attempt binds the entry to the new lease
    assert taken.ref.session == waiter.store.sessions.current(queue.last.ttl).id


@pytest.mark.usefixtures("no_fallback")
def test_an_abandoned_waiter_wakes_the_one_behind_it(peer: Callable[[], Peer]) -> None:
    """That one has to wait for the holder then, and the holder does not know it."""
    queue = Queue(peer)
    waiting = queue.wait()
    run_now(queue.second.backend.abandon(queue.waiting))
    assert waiting.ended()
    busy = _busy(queue.third, queue.last)
    assert busy.ref[0] == (queue.held.ref.key, queue.held.token)
    assert not busy.ref[2]  # so it watches


@pytest.mark.usefixtures("no_fallback")
def test_a_release_whose_next_waiter_is_gone_wakes_another(peer: Callable[[], Peer]) -> None:
    """The waiter that the release would grant to has left the queue."""
    queue = Queue(peer)
    grant = queue.advance()
    fourth = peer()
    behind = claim_of()
    _busy(fourth, behind)
    run_now(fourth.backend.release(fourth.take(claim_of("warm"))))
    _listening(fourth)
    busy = _busy(fourth, behind)
    assert busy.ref[2]
    waiting = Waiting(fourth, behind, busy)
    _delete_entry(queue.third, queue.last)
    run_now(queue.second.backend.release(grant))
    assert waiting.ended()
    assert fourth.take(behind).token > grant.token


def _delete_entry(one: Peer, claim: Claim) -> None:
    key = one.store.key(claim)
    run_now(one.backend.calls.call(DELETE, requests.only(key)))


@pytest.mark.usefixtures("no_fallback")
def test_a_broken_hold_wakes_the_next_waiter(peer: Callable[[], Peer]) -> None:
    queue = Queue(peer)
    waiting = queue.wait()
    queue.advance()
    assert run_now(queue.first.backend.revoke("name"))
    assert waiting.ended()
    assert isinstance(queue.third.attempt(queue.last), Grant)


def test_a_missing_wake_up_is_noticed(peer: Callable[[], Peer]) -> None:
    """A lease that runs out wakes no waiter: the watch that starts after a moment does."""
    queue = Queue(peer)
    waiting = queue.wait()
    _delete_entry(queue.second, queue.waiting)
    assert waiting.ended()


@pytest.mark.usefixtures("no_fallback")
def test_the_waiter_behind_a_direct_grant_notes_it_without_an_attempt(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace of a direct grant that nobody takes counts from then, not from a later re-check.
    The waiter sends nothing: in a queue that is served, that would be a request per hold."""
    queue = Queue(peer)
    behind, claim = peer(), claim_of()

    async def not_woken(*_: object) -> bool:
        return False

    monkeypatch.setattr(behind.backend.waits, "_woken_by_release", not_woken)
    waiting = Waiting(behind, claim, _busy(behind, claim))
    queue.direct_grant()
    deadline = now() + SOON
    while not _noted(behind) and now() < deadline:
        threading.Event().wait(0.01)
    known = now()
    waiting.join(1.0)
    assert waiting.is_alive(), "it was woken"
    behind.backend.nudge(claim)
    assert waiting.ended()
    assert _busy(behind, claim).retry_seconds is not None
    assert max(behind.backend._absent_waiters._since.values()) <= known


def _noted(one: Peer) -> bool:
    """Whether a write of the entry ahead was noted, by a watch or by the read before it."""
    watches: Any = one.backend.waits.watches
    source = watches._source
    there = [] if source is None else list(source.table._watches.values())
    noted = any(watch.written for watch in there)
    return noted or bool(one.backend._absent_waiters._since)


def test_readers_and_slots_watch_from_the_start(peer: Callable[[], Peer]) -> None:
    """They do not wait for the entry ahead alone."""
    first, second = peer(), peer()
    first.take(claim_of("read"))
    _busy(second, claim_of("read"))
    assert not _busy(second, claim_of("read", Mode.SHARED)).ref[2]
    first.take(claim_of("slots", Mode.SLOTS, limit=1))
    _busy(second, claim_of("slots", Mode.SLOTS, limit=1))
    assert not _busy(second, claim_of("slots", Mode.SLOTS, limit=1)).ref[2]


@pytest.mark.usefixtures("no_fallback")
def test_a_lost_connection_ends_the_wait(peer: Callable[[], Peer]) -> None:
    """A waiter that relied on the subscription opens a new one."""
    queue = Queue(peer)
    waiting = queue.wait()
    watches: Any = queue.third.backend.waits.watches
    watches.reset_connection()
    _delete_entry(queue.second, queue.waiting)
    assert waiting.ended()


def test_a_cancelled_subscription_is_opened_again() -> None:
    """Its waiters are woken, and the cancelled watch is forgotten."""
    table, keys = WatchTable(), requests.only(b"a")
    first, _ = table.subscribe("session", keys, ["session"])
    assert table.subscribed("session") is first
    table.received(helpers.watch_message(first.number, created=True))
    assert table.received(helpers.watch_message(first.number, canceled=True)) == [EVERYBODY]
    assert table.subscribed("session") is None
    second, wanted = table.subscribe("session", keys, ["session"])
    assert second.number != first.number
    assert wanted == [messages.create_watch(keys, second.number, ends_only=False)]
    assert table.fail_all() == [EVERYBODY]  # once: the first watch is forgotten

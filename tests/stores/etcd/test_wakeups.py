"""Waiters behind waiters on etcd: given the name by the one in front, and watching if not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core import ordered as lines
from holdfast.core.contract import DIRECT_GRANT_SECONDS
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.http import Reply
from holdfast.io.wakeups import EVERYBODY
from holdfast.stores.etcd import wakeups
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
    """Its subscription is live: what is asked from now on can't be called too early."""
    subscription = one.store.names.wakeup_key
    session = one.store.sessions.all()[0].id
    watches: Any = one.backend.waits.watches
    keys = f'"key":"{subscription(session).decode()}"'
    watch = run_now(watches.subscribe(session, keys, [session], now() + SOON))
    deadline = now() + SOON
    while watch.start_revision is None and now() < deadline:
        run_now(watches.woken("nobody", now() + 0.05))


class Waiting(threading.Thread):
    """One claim's wait, and what it brought."""

    def __init__(self, one: Peer, claim: Claim, busy: Busy) -> None:
        super().__init__()
        self._work = one.backend.wait(claim, busy, now() + LATER)
        self.brought: Grant | None = None
        self.start()

    def run(self) -> None:
        self.brought = run_now(self._work)

    def ended(self) -> bool:
        self.join(SOON)
        return not self.is_alive()


class Line:
    """One who holds, one who waits for it, and one behind that one, each in a client of its own."""

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
        """The last one's wait."""
        return Waiting(self.third, self.last, self.busy)

    def turn(self) -> Grant:
        """The first lets go and the second takes over."""
        run_now(self.first.backend.release(self.held))
        return self.second.take(self.waiting)

    def handed(self) -> Grant:
        """What the second's release brings to the last one, who waits."""
        waiting = self.wait()
        run_now(self.second.backend.release(self.turn()))
        assert waiting.ended()
        assert waiting.brought is not None
        return waiting.brought


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who relies on being called does so for good."""
    monkeypatch.setattr(wakeups, "WAKEUP_TRUST_SECONDS", 2 * SOON)


@pytest.mark.usefixtures("patient")
def test_a_release_hands_the_name_over(peer: Callable[[], Peer]) -> None:
    """One request lets go and grants; one, which writes nothing, makes sure of it."""
    line = Line(peer)
    assert line.busy.ref[2]
    line.third.post.asked.clear()
    waiting = line.wait()
    grant = line.turn()
    line.second.post.asked.clear()
    assert run_now(line.second.backend.release(grant))
    assert len(line.second.post.asked) == 1
    assert waiting.ended()
    assert len(line.third.post.asked) == 1
    assert waiting.brought is not None
    assert waiting.brought.token > grant.token
    assert waiting.brought.seconds == DIRECT_GRANT_SECONDS
    holder = run_now(line.first.backend.look("name")).holders[0]
    assert holder.token == waiting.brought.token


@pytest.mark.usefixtures("patient")
def test_what_was_handed_over_is_kept_by_its_first_renewal(peer: Callable[[], Peer]) -> None:
    """Which says in the entry that somebody came. Later ones write nothing."""
    line = Line(peer)
    handed = line.handed()
    for requests in (4, 3):
        line.third.post.asked.clear()
        renewal = run_now(line.third.backend.renew([handed], [], until=now() + SOON))
        assert (renewal.lost, renewal.unknown) == ({}, {})
        assert len(line.third.post.asked) == requests
    behind = claim_of()
    busy = _busy(line.first, behind)
    assert busy.retry_seconds is None  # nobody thinks of skipping it any more
    assert run_now(line.third.backend.release(handed))
    assert line.first.take(behind).token > handed.token


@pytest.mark.usefixtures("patient")
def test_an_answer_that_comes_late_takes_nothing_back(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that asked on behalf of another, before that one was handed the name."""
    line = Line(peer)
    answered, late = threading.Event(), threading.Event()
    ask = line.third.post.ask

    async def held_back(words: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        reply = await ask(words, body, until)
        if threading.current_thread() is asking:
            answered.set()
            late.wait(LATER)
        return reply

    monkeypatch.setattr(line.third.post, "ask", held_back)
    asking = threading.Thread(target=line.third.attempt, args=(line.last,))
    asking.start()
    assert answered.wait(SOON)
    handed = line.handed()
    late.set()
    asking.join(SOON)
    renewal = run_now(line.third.backend.renew([handed], [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert _busy(line.first, claim_of()).retry_seconds is None  # nobody would skip it


@pytest.mark.usefixtures("patient")
def test_all_that_was_handed_over_is_confirmed_at_once(peer: Callable[[], Peer]) -> None:
    """They last for a moment only, and a slow store must not be asked for one after the other."""
    peers = [peer() for _ in range(3)]
    lines = (Line(partial(next, iter(peers)), str(number)) for number in range(5))
    handed = [line.handed() for line in lines]
    last = peers[-1]
    last.post.asked.clear()
    renewal = run_now(last.backend.renew(handed, [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert len(last.post.asked) == 4


def test_a_release_is_done_although_nobody_can_be_called(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered is known; the next one looks by itself in a moment."""
    line = Line(peer)
    grant = line.turn()
    run_now(line.third.backend.abandon(line.last))  # so that it calls whoever is there instead
    behind = claim_of()
    _busy(line.first, behind)
    post = line.second.post
    ask = post.ask

    async def all_but_the_call(
        words: bytes, body: bytes = b"", until: float | None = None
    ) -> Reply:
        if len(post.asked) == 2:  # it could not hand over, and has left
            raise BackendUnavailable("cut")
        return await ask(words, body, until)

    post.asked.clear()
    monkeypatch.setattr(post, "ask", all_but_the_call)
    assert run_now(line.second.backend.release(grant))
    assert line.first.take(behind).token > grant.token


@pytest.mark.usefixtures("patient")
def test_who_does_not_come_for_it_loses_it(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place is taken after the grace, and it learns so when it is renewed."""
    line = Line(peer)
    handed = line.handed()
    behind = claim_of()
    assert _busy(line.first, behind).retry_seconds is not None
    monkeypatch.setattr(lines, "DIRECT_GRANT_SECONDS", 0.0)
    taken = line.first.take(behind)
    assert taken.token > handed.token
    renewal = run_now(line.third.backend.renew([handed], [], until=now() + SOON))
    assert list(renewal.lost) == [handed.claim.owner]


@pytest.mark.usefixtures("patient")
def test_a_hold_that_was_broken_hands_nothing_over(peer: Callable[[], Peer]) -> None:
    """Its late release must not make a holder of the next while another one holds."""
    line = Line(peer)
    grant = line.turn()
    assert run_now(line.first.backend.revoke("name"))
    taken = line.third.take(line.last)
    behind = claim_of()
    _busy(line.first, behind)
    assert not run_now(line.second.backend.release(grant))
    tokens = [each.token for each in run_now(line.first.backend.look("name")).holders]
    assert tokens == [taken.token]
    assert run_now(line.third.backend.renew([taken], [], until=now() + SOON)).lost == {}


@pytest.mark.usefixtures("patient")
def test_what_was_handed_to_another_lease_is_not_taken(peer: Callable[[], Peer]) -> None:
    """Its time would be counted by a lease that the entry does not end with."""
    line = Line(peer)
    run_now(line.second.backend.release(line.turn()))
    heir = line.third
    assert run_now(heir.backend._direct_grant(line.last, now() + SOON)) is not None
    heir.store.sessions.ended(heir.store.sessions.current(line.last.ttl).id)
    assert run_now(heir.backend.leases.session(line.last.ttl))
    assert run_now(heir.backend._direct_grant(line.last, now() + SOON)) is None
    taken = heir.take(line.last)  # its own attempt binds it to the new one
    assert taken.ref.session == heir.store.sessions.current(line.last.ttl).id


@pytest.mark.usefixtures("patient")
def test_who_gives_up_calls_who_stood_behind_it(peer: Callable[[], Peer]) -> None:
    """It is the first's turn to be waited for then, and the first knows nothing of it."""
    line = Line(peer)
    waiting = line.wait()
    run_now(line.second.backend.abandon(line.waiting))
    assert waiting.ended()
    busy = _busy(line.third, line.last)
    assert busy.ref[0] == (line.held.ref.key, line.held.token)
    assert not busy.ref[2]  # so it watches


@pytest.mark.usefixtures("patient")
def test_who_came_between_is_no_longer_there(peer: Callable[[], Peer]) -> None:
    """A release whose heir has left calls whoever is next instead."""
    line = Line(peer)
    grant = line.turn()
    fourth = peer()
    behind = claim_of()
    _busy(fourth, behind)
    run_now(fourth.backend.release(fourth.take(claim_of("warm"))))
    _listening(fourth)
    busy = _busy(fourth, behind)
    assert busy.ref[2]
    waiting = Waiting(fourth, behind, busy)
    _leave_silently(line.third, line.last)
    run_now(line.second.backend.release(grant))
    assert waiting.ended()
    assert fourth.take(behind).token > grant.token


def _leave_silently(one: Peer, claim: Claim) -> None:
    key = one.store.key(claim)
    run_now(one.backend.gateway.post(b"POST /v3/kv/deleterange", b'{"key":"%b"}' % key))


@pytest.mark.usefixtures("patient")
def test_a_broken_hold_calls_the_next(peer: Callable[[], Peer]) -> None:
    line = Line(peer)
    waiting = line.wait()
    line.turn()
    assert run_now(line.first.backend.revoke("name"))
    assert waiting.ended()
    assert isinstance(line.third.attempt(line.last), Grant)


def test_nobody_calls_and_it_is_noticed(peer: Callable[[], Peer]) -> None:
    """A lease that runs out calls nobody: a watch is begun in time."""
    line = Line(peer)
    waiting = line.wait()
    _leave_silently(line.second, line.waiting)
    assert waiting.ended()


def test_readers_and_slots_watch_from_the_start(peer: Callable[[], Peer]) -> None:
    """They don't wait for the one in front alone."""
    first, second = peer(), peer()
    first.take(claim_of("read"))
    _busy(second, claim_of("read"))
    assert not _busy(second, claim_of("read", Mode.SHARED)).ref[2]
    first.take(claim_of("slots", Mode.SLOTS, limit=1))
    _busy(second, claim_of("slots", Mode.SLOTS, limit=1))
    assert not _busy(second, claim_of("slots", Mode.SLOTS, limit=1)).ref[2]


@pytest.mark.usefixtures("patient")
def test_a_lost_connection_ends_the_wait(peer: Callable[[], Peer]) -> None:
    """Whoever relied on the subscription starts over with another."""
    line = Line(peer)
    waiting = line.wait()
    watches: Any = line.third.backend.waits.watches
    watches.reset_connection()
    _leave_silently(line.second, line.waiting)
    assert waiting.ended()


def test_a_subscription_that_etcd_cancelled_is_hung_anew() -> None:
    """Whoever relied on it is told, and nothing of it is left."""
    table = WatchTable()
    first, _ = table.subscribe("session", '"key":"YQ=="', ["session"])
    assert table.subscribed("session") is first
    words = '{"result":{"header":{"revision":"7"},"watch_id":"%d","%s":true}}'
    table.received(words % (first.number, "created"))
    assert table.received(words % (first.number, "canceled")) == [EVERYBODY]
    assert table.subscribed("session") is None
    second, requests = table.subscribe("session", '"key":"YQ=="', ["session"])
    assert second.number != first.number
    assert any("create_request" in request for request in requests)
    assert table.fail_all() == [EVERYBODY]  # once: the first is forgotten

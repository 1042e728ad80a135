"""Leases of etcd that end while a request is unanswered, or change under a hold; renewals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.claim import Busy, Grant
from holdfast.core.contract import Renewal, Waiting
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, LockLost
from holdfast.io.clock import now
from holdfast.stores.etcd import requests
from holdfast.testing import Flavour
from servers.etcd import EtcdServer
from servers.process import wait_until
from stores.claims import claim_of
from stores.etcd import helpers
from stores.http_peer import Counting, Peer

SOON = 60.0
server, peer = helpers.server, helpers.peer
Peers = Callable[[Flavour], Peer]
every_flavour = pytest.mark.parametrize("flavour", list(Flavour))


@every_flavour
@pytest.mark.parametrize("waits", [False, True], ids=["held", "waiting"])
def test_an_outage_that_ends_a_lease_leaves_nothing_behind(
    peer: Peers, server: EtcdServer, flavour: Flavour, waits: bool
) -> None:
    """A request is unanswered and its lease runs out before the claim's next attempt. What that
    attempt gets, under another lease, is released like any other hold."""
    ours, theirs = peer(flavour), peer(flavour)
    ours.run(ours.backend.release(ours.take(claim_of("warm"))))
    held = theirs.take(claim_of()) if waits else None
    claim = claim_of()
    ours.post.lose = b"txn"
    with pytest.raises(BackendUnavailable):
        ours.attempt(claim)
    (session,) = ours.store.sessions.all()
    server.ask("/v3/lease/revoke", {"ID": session.id})
    answer = ours.attempt(claim)
    assert session not in ours.store.sessions.all()
    if isinstance(answer, Grant):
        assert ours.run(ours.backend.release(answer)) is True
    else:
        ours.run(ours.backend.abandon(claim))
    assert isinstance(answer, Busy) is waits
    info = theirs.run(theirs.backend.look("name"))
    assert ([each.token for each in info.holders], info.waiters) == (
        [] if held is None else [held.token],
        (),
    )
    assert not ours.store.sessions.doubts


def _renew(one: Peer, *grants: Grant) -> Renewal:
    renewal: Renewal = one.run(one.backend.renew(grants, [], until=now() + SOON))
    return renewal


def _kept(one: Peer, grant: Grant, ttl: float | None = None) -> None:
    """The hold is renewed, bound to the lease of its ttl (or of ``ttl``), and nothing else
    changed."""
    renewal = _renew(one, grant)
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert [each.token for each in one.run(one.backend.look("name")).holders] == [grant.token]
    session = one.store.sessions.current(ttl or grant.claim.ttl)
    _, keys = one.run(one.backend.leases.time_to_live(session.id))
    assert keys == {grant.ref.key}
    assert one.run(one.backend.release(grant)) is True


def _with_ttl(grant: Grant, ttl: float) -> Grant:
    return grant._replace(claim=grant.claim._replace(ttl=ttl))


@every_flavour
def test_an_unanswered_change_of_the_ttl_costs_no_hold(
    peer: Peers, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd executed the change, and the next renewal has the old ttl: the hold keeps the longer
    one."""
    one = peer(flavour)
    grant = one.take(claim_of(ttl=30.0))
    ask = one.post.ask

    async def unanswered(line: bytes, body: bytes = b"", until: float | None = None) -> Any:
        reply = await ask(line, body, until)
        session = one.store.sessions.current(60.0)
        if session and requests.bind(grant.ref.key.encode(), session.id) in body:
            raise BackendUnavailable("lost on its way back")
        return reply

    monkeypatch.setattr(one.post, "ask", unanswered)
    assert list(_renew(one, _with_ttl(grant, 60.0)).unknown) == [grant.claim.owner]
    monkeypatch.undo()
    _kept(one, grant, 60.0)


@every_flavour
def test_a_renewal_that_crosses_a_change_of_the_ttl_costs_no_hold(
    peer: Peers, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of the old lease are listed after the hold has moved to another lease."""
    one = peer(flavour)
    grant = one.take(claim_of(ttl=30.0))
    extended = _with_ttl(grant, 60.0)
    leases = one.backend.leases
    look = leases.time_to_live

    async def late(session: str, until: float | None = None) -> object:
        monkeypatch.undo()
        moved = await one.backend.renew([extended], [], until=now() + SOON)
        assert (moved.lost, moved.unknown) == ({}, {})
        return await look(session, until)

    monkeypatch.setattr(leases, "time_to_live", late)
    renewal = _renew(one, grant)
    assert (renewal.lost, renewal.unknown) == ({}, {})
    _kept(one, extended)


@every_flavour
def test_an_old_list_of_keys_costs_no_hold(
    peer: Peers, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of a lease's keys may come from a node that does not have the latest changes."""
    one = peer(flavour)
    grant = one.take(claim_of())

    async def old(session: str, until: float | None = None) -> tuple[float, frozenset[str]]:
        return 30.0, frozenset()

    monkeypatch.setattr(one.backend.leases, "time_to_live", old)
    renewal = _renew(one, grant)
    assert (renewal.lost, renewal.unknown) == ({}, {})
    monkeypatch.undo()
    assert one.run(one.backend.revoke("name")) == [grant.token]
    assert "broken" in _renew(one, grant).lost[grant.claim.owner]


@every_flavour
def test_a_waiter_that_joined_again_is_refreshed_like_any_other(
    peer: Peers, server: EtcdServer, flavour: Flavour
) -> None:
    """Other clients skipped the waiter; it joined again at the end of the queue."""
    ours, theirs = peer(flavour), peer(flavour)
    ours.take(claim_of())
    claim = claim_of()
    assert isinstance(theirs.attempt(claim), Busy)
    server.ask("/v3/kv/deleterange", {"key": helpers.encoded(theirs.store.key(claim).decode())})
    assert isinstance(theirs.attempt(claim), Busy)
    for behind in (3, 5):
        refresh = theirs.backend.renew([], [Waiting(claim, behind)], until=now() + SOON)
        assert not theirs.run(refresh).forgotten
        (waiter,) = ours.run(ours.backend.look("name")).waiters
        assert waiter.behind == behind


def test_many_ttls_are_changed_in_few_requests(peer: Peers) -> None:
    """A hundred holds are looked up in one request and moved in another."""
    one = peer(Flavour.BLOCKING)
    grants = [one.take(claim_of(f"name {number}", ttl=30.0)) for number in range(120)]
    one.post.asked.clear()
    renewal = _renew(one, *(_with_ttl(grant, 60.0) for grant in grants))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert len(one.post.asked) == 5  # one more is for the lease


def test_a_lost_hold_leaves_no_pending_undo(server: EtcdServer, namespace: str) -> None:
    """The first request of a hold may still arrive after a second one was granted and the hold was
    broken."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with locks.lock("warm"):
            pass
        client: Any = locks._engine
        calls, doubts = client.backend.calls, client.store.sessions.doubts
        post = calls.wire = Counting(calls.wire)
        post.lose = b"txn"
        lease = locks.lock("name", timeout=SOON).acquire()
        assert lease
        assert len(doubts) == 1
        assert locks.break_lock("name", reason="a test") == lease.token
        with pytest.raises(LockLost):
            lease.extend()
        wait_until("the request is undone", lambda: not doubts, SOON)
        assert post.lost is not None
        run_now(post.http.ask(*post.lost))
        assert locks.inspect("name").holders == ()
